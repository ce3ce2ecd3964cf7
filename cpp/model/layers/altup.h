#ifndef GEMMAKV_MODEL_LAYERS_ALTUP_H_
#define GEMMAKV_MODEL_LAYERS_ALTUP_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// Alternating updates: every row of a step has altup_inputs residual streams,
// of which layers compute one. Before a layer all streams are predicted from
// all; after it all are corrected by what the layer made of the one. Owns the
// streams. Without altup_inputs there is nothing to call.
class AltUp {
 public:
  // Not owned; must outlive this.
  explicit AltUp(const ModelConfig& config) : config_(config) {}

  // Makes the streams of the step's rows, whose scaled embeddings are in
  // `input`.
  void Begin(const Weights& weights, Activations& input, const StepWork& work);
  // Moves a row to the place of an earlier one.
  void MoveRow(size_t from, size_t to);
  // Predicts the row's streams before a layer. x [hidden_size] becomes the
  // active one.
  void Predict(const LayerWeights& weights, size_t row, float* x);
  // Corrects the row's streams after a layer, which made x of the active one.
  // `gated` [hidden_size], unless it is null, becomes what gates the layer's
  // embedding.
  void Correct(const LayerWeights& weights, size_t row, const float* x,
               float* gated);
  // Adds y to all of the row's streams but the first.
  void AddToOthers(size_t row, const float* y);
  // Joins the streams after all layers: x [rows, hidden_size] becomes their
  // mean, where all but the first are projected and get the magnitude of the
  // first. `input` and `projected` are for the products.
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
