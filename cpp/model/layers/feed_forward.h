#ifndef GEMMAKV_MODEL_LAYERS_FEED_FORWARD_H_
#define GEMMAKV_MODEL_LAYERS_FEED_FORWARD_H_

#include "base/aligned_buffer.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// The gated feed-forward of every layer. Owns the activations.
class FeedForward {
 public:
  // Writes out [rows, hidden_size], without the bias of the last product.
  // Widths are those of the weights; for `cutoff` see
  // LayerConfig::sparsity_cutoff.
  void Compute(const LayerWeights& weights, double cutoff, Activations& input,
               float* out, const StepWork& work);

 private:
  AlignedBuffer<float> gate_, up_;  // [rows, ffn_dim], or stretches of both
  Activations activated_;           // [rows, ffn_dim]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_FEED_FORWARD_H_
