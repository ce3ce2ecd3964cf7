#ifndef GEMMAKV_MODEL_TENSOR_NAMES_H_
#define GEMMAKV_MODEL_TENSOR_NAMES_H_

#include <string>
#include <vector>

#include "io/tensor_source.h"
#include "model/config.h"

namespace gkv {

// The tensors of a source that a model of this configuration reads, in the
// source's order. Throws CorruptFile naming a tensor of a layer that the model
// does not have: more layers than it states, norms or biases of another family.
// Reading on would leave out what the weights were made for. Other tensors,
// such as those of image encoders, may stand beside the model, whatever they
// are. Reads names only. Requires: config.Validate() passes.
std::vector<std::string> TensorNames(const ModelConfig& config,
                                     const TensorSource& source);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_TENSOR_NAMES_H_
