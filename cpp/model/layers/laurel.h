#ifndef GEMMAKV_MODEL_LAYERS_LAUREL_H_
#define GEMMAKV_MODEL_LAYERS_LAUREL_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// The learned augmented residual (LAuReL: Menghani et al. 2024, arXiv
// 2411.07501): beside its temporal mixing, a layer adds its input and what two
// products of low rank make of that. Owns the activations.
class Laurel {
 public:
  // Not owned; must outlive this.
  explicit Laurel(const ModelConfig& config) : config_(config) {}

  // Computes the products of a layer's normalized input.
  void Compute(const LayerWeights& weights, Activations& input,
               const StepWork& work);
  // x = (x + input + norm(product)) / sqrt(2) for a row, where x is the
  // residual stream after the temporal mixing, and `input` what Compute read.
  void AddTo(const LayerWeights& weights, size_t row, const float* input,
             float* x);

 private:
  const ModelConfig& config_;
  Activations low_;               // [rows, laurel_rank]
  AlignedBuffer<float> product_;  // [rows, hidden_size]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_LAUREL_H_
