#ifndef GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_
#define GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_

#include "gemmakv/config.h"
#include "io/gguf.h"

namespace gkv {

// Throws Mismatch unless the file says that it holds a model, or does not say
// what it holds. An adapter has the architecture of the model that it was made
// for.
void CheckGgufKind(const GgufFile& file);

// Checks the keys of the file's architecture that the configuration was not
// read from. Throws Mismatch, which names a key that is unknown, or whose value
// is not the one that a model of this configuration computes with. Other
// architectures, other programs and parts beside the language model may have
// any keys. Requires: `config` is that of the file.
void CheckGgufKeys(const GgufFile& file, const ModelConfig& config);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_CONFIG_GGUF_KEYS_H_
