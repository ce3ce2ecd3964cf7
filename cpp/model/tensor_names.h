#ifndef GEMMAKV_MODEL_TENSOR_NAMES_H_
#define GEMMAKV_MODEL_TENSOR_NAMES_H_

#include "io/tensor_source.h"
#include "model/config.h"

namespace gkv {

// Throws CorruptFile naming a tensor of a layer that a model of this
// configuration does not have: more layers than it states, norms or biases of
// another family. Reading on would leave out what the weights were made for.
// Other tensors, such as those of image encoders, may stand beside the model.
// Reads names only. Requires: config.Validate() passes.
void CheckTensorNames(const ModelConfig& config, TensorSource& source);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_TENSOR_NAMES_H_
