#ifndef GEMMAKV_MODEL_LAYERS_PER_LAYER_EMBEDDING_H_
#define GEMMAKV_MODEL_LAYERS_PER_LAYER_EMBEDDING_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// Per-layer embeddings: every row of a step has a vector for each layer, made
// of its token and of its embedding. The vector gates what a layer adds to the
// residual stream. Owns the activations.
class PerLayerEmbedding {
 public:
  // Not owned; must outlive this.
  explicit PerLayerEmbedding(const ModelConfig& config) : config_(config) {}

  // Makes the vectors of the step's rows, whose scaled embeddings are in
  // `input`. Tokens beyond the table have its row 0.
  void Begin(const Weights& weights, Activations& input, const StepWork& work);
  // Moves a row to the place of an earlier one.
  void MoveRow(size_t from, size_t to);
  // Writes out [rows, hidden_size] from the residual stream after the
  // feed-forward, in `input`, without the norm that follows.
  void Compute(const LayerWeights& weights, size_t layer, Activations& input,
               float* out, const StepWork& work);

 private:
  size_t width() const { return config_.num_layers() * config_.ple_dim; }
  float* vectors(size_t row) { return vectors_.data() + row * width(); }
  void Join(const Weights& weights, size_t row, size_t table_row);

  const ModelConfig& config_;
  AlignedBuffer<float> vectors_;  // [rows, num_layers, ple_dim]
  AlignedBuffer<float> gate_;     // [rows, ple_dim]
  Activations gated_;             // [rows, ple_dim]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_PER_LAYER_EMBEDDING_H_
