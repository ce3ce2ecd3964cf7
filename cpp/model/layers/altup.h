#ifndef GEMMAKV_MODEL_LAYERS_ALTUP_H_
#define GEMMAKV_MODEL_LAYERS_ALTUP_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// Alternating updates: every row of a step has altup_inputs residual streams.
// Layers compute one of them. Before a layer all are predicted from all, behind
// it all are corrected by what the layer made of its own. Owns the streams.
// Without altup_inputs there is nothing to call.
class AltUp {
 public:
  // Not owned; must outlive this.
  explicit AltUp(const ModelConfig& config) : config_(config) {}

  // The streams of the step's rows, whose scaled embeddings are in `input`.
  void Begin(const Weights& weights, Activations& input, const StepWork& work);
  // A row takes the place of an earlier one.
  void MoveRow(size_t from, size_t to);
  // Before a layer: x [hidden_size] becomes the row's active stream, predicted.
  void Predict(const LayerWeights& weights, size_t row, float* x);
  // Behind a layer, which made x of it. Then `gated` [hidden_size], unless it
  // is null, becomes what gates the layer's embedding.
  void Correct(const LayerWeights& weights, size_t row, const float* x,
               float* gated);
  // Adds to all streams but the first.
  void AddToOthers(size_t row, const float* y);
  // Of all layers: x [rows, hidden_size] becomes the mean of the streams, each
  // but the first projected to the magnitude of the first. `input` and
  // `projected` are for the products.
  void Merge(const Weights& weights, Activations& input, float* projected,
             float* x, const StepWork& work);

 private:
  size_t hidden() const { return config_.hidden_size; }
  float* stream(size_t index, size_t row) {
    return streams_.data() + index * stride_ + row * hidden();
  }
  void Route(const LayerWeights& weights, const float* x, float* routes) const;

  const ModelConfig& config_;
  size_t stride_ = 0;             // from a stream to the next
  AlignedBuffer<float> streams_;  // [altup_inputs, rows, hidden_size]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_ALTUP_H_
