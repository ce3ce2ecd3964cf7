#ifndef GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_
#define GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_

#include "gemmakv/config.h"
#include "io/gguf.h"

namespace gkv {

// Throws Mismatch unless the file says that it holds a model, or says nothing
// of what it holds: an adapter has the architecture of the model that it was
// made for.
void CheckGgufKind(const GgufFile& file);

// Checks the keys of the file's architecture that the configuration was not
// read from. Throws Mismatch naming a key that is unknown, or whose value is
// another than what a model of this configuration computes with. Keys of other
// architectures and other programs, and of parts beside the language model, may
// be any. Requires: `config` is that of the file.
void CheckGgufKeys(const GgufFile& file, const ModelConfig& config);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_
