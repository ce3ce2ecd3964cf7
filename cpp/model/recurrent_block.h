#ifndef GEMMAKV_MODEL_RECURRENT_BLOCK_H_
#define GEMMAKV_MODEL_RECURRENT_BLOCK_H_

#include <cstddef>
#include <span>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "model/activations.h"
#include "model/config/config.h"
#include "model/step.h"
#include "model/weights/weights.h"

namespace gkv {

// What a recurrent layer does between its projections: the x branch goes
// through the convolution and the recurrence, which carry the conversation's
// state from row to row, and is gated by the y branch. Owns the activations.
//
// Diagonal blocks of the gates never meet: each is a task of its own, from the
// convolution to the result. Rows of a slice follow one another, so how a
// conversation is cut into slices changes no bit.
class RecurrentBlock {
 public:
  // Requires: a model with recurrent layers.
  void Resize(const ModelConfig& config, size_t rows);

  // Outputs of the projections, without their biases, [rows, lru_width].
  float* x() { return x_.data(); }
  float* y() { return y_.data(); }

  // Fills output() [rows, lru_width], floats only, and turns the layer's states
  // in the slices' views into those after the slices. Overwrites x and y.
  void Mix(const ModelConfig& config, const RecurrentWeights& weights,
           size_t layer, std::span<const SequenceSlice> slices,
           ThreadPool& pool);
  Activations& output() { return output_; }

 private:
  class Block;

  size_t rows_ = 0;
  AlignedBuffer<float> x_, y_;                // [rows, lru_width]
  AlignedBuffer<float> convolved_;            // [rows, lru_width]
  AlignedBuffer<float> input_gate_, a_gate_;  // [rows, lru_width]
  Activations output_;                        // [rows, lru_width]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_RECURRENT_BLOCK_H_
