#ifndef GEMMAKV_MODEL_LAYERS_RECURRENT_H_
#define GEMMAKV_MODEL_LAYERS_RECURRENT_H_

#include <cstddef>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// The temporal mixing of recurrent layers. There are two projections. The x
// branch goes through the convolution and the recurrence, which carry the
// conversation's state from row to row; the y branch gates the result. Owns the
// activations.
//
// The diagonal blocks of the gates are independent, so each is a task of its
// own, from the convolution to the result. It takes the rows of a slice in
// order, so how a conversation is cut into slices changes no bit.
class Recurrent {
 public:
  // Not owned; must outlive this.
  explicit Recurrent(const ModelConfig& config) : config_(config) {}

  // Returns [rows, lru_width] for the step's rows in `input`, quantized, too.
  // Turns the layer's states in the slices' views into those after the slices.
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
