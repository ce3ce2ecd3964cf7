#ifndef GEMMAKV_MODEL_CONFIG_CONFIG_GGUF_H_
#define GEMMAKV_MODEL_CONFIG_CONFIG_GGUF_H_

#include "gemmakv/config.h"
#include "io/gguf.h"

namespace gkv {

// Returns the configuration that a file's metadata state. Fields that files
// commonly omit get the family's defaults. Throws CorruptFile for metadata that
// are missing or contradictory, Mismatch for an architecture, or a variant of
// it, that is not supported. If the result has the shape of a named type, it
// carries that name.
ModelConfig ConfigFromGguf(GgufFile& file);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CONFIG_CONFIG_GGUF_H_
