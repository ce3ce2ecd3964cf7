#ifndef GEMMAKV_MODEL_LAYERS_RECURRENT_H_
#define GEMMAKV_MODEL_LAYERS_RECURRENT_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// The temporal mixing of recurrent layers: of two projections, the x branch
// goes through the convolution and the recurrence, which carry the
// conversation's state from row to row, and is gated by the y branch. Owns the
// activations.
//
// Diagonal blocks of the gates never meet: each is a task of its own, from the
// convolution to the result. Rows of a slice follow one another, so how a
// conversation is cut into slices changes no bit.
class Recurrent {
 public:
  // Not owned; must outlive this.
  explicit Recurrent(const ModelConfig& config) : config_(config) {}

  // Of the step's rows in `input`: gives [rows, lru_width], floats only, and
  // turns the layer's states in the slices' views into those after the slices.
  Activations& Mix(const RecurrentWeights& weights, size_t layer,
                   Activations& input, const StepWork& work);

 private:
  class Block;

  const ModelConfig& config_;
  AlignedBuffer<float> x_, y_;                // [rows, lru_width]
  AlignedBuffer<float> convolved_;            // [rows, lru_width]
  AlignedBuffer<float> input_gate_, a_gate_;  // [rows, lru_width]
  Activations output_;                        // [rows, lru_width]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_RECURRENT_H_
