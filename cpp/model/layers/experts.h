#ifndef GEMMAKV_MODEL_LAYERS_EXPERTS_H_
#define GEMMAKV_MODEL_LAYERS_EXPERTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step_work.h"
#include "model/weights/weights.h"

namespace gkv {

// The experts of a layer: a router chooses a few for each row, whose results
// are weighted and added. Owns the activations.
//
// Rows are put together by expert, so a step reads the weights of each expert
// once, and only of experts that some row has chosen. The result of a row does
// not depend on the other rows: each product is that of the row alone, of equal
// scores the expert of the lower number wins, and a row adds its experts in the
// order of their numbers.
class Experts {
 public:
  // Not owned; must outlive this.
  explicit Experts(const ModelConfig& config) : config_(config) {}

  // Adds the experts to the feed-forward. x [rows, hidden_size] is the residual
  // stream after attention, and `out` [rows, hidden_size] the output of the
  // feed-forward without its bias. `out` becomes the sum of the feed-forward
  // and the experts, each normed.
  void Join(const LayerWeights& weights, const float* x, float* out,
            const StepWork& work);

 private:
  void Choose(const ExpertWeights& weights, size_t row);
  void SortByExpert(size_t rows);
  void Gather(TensorType type, const StepWork& work);
  // Adds to `parts_` the products of every expert's rows with its part of a
  // matrix, which has `height` rows, to `out` [chosen, stride].
  void AddParts(const PackedMatrix& matrix, size_t height, Activations& input,
                float* out, size_t stride, const StepWork& work);

  const ModelConfig& config_;
  Activations routed_;            // [rows, hidden_size], what the router reads
  Activations input_;             // [rows, hidden_size], what experts read
  AlignedBuffer<float> scores_;   // [rows, num_experts]
  // The experts that each row has chosen, in ascending order.
  std::vector<uint32_t> chosen_;  // [rows, experts_used]
  std::vector<float> factors_;    // the same
  std::vector<size_t> place_;     // the same: their places in what follows
  // The rows that have chosen an expert, by expert: expert e has [begin_[e],
  // begin_[e + 1]).
  std::vector<size_t> begin_;         // [num_experts + 1]
  std::vector<size_t> row_of_;        // [rows * experts_used]
  Activations gathered_;              // [the same, hidden_size]
  AlignedBuffer<float> gate_up_;      // [the same, 2 * expert_ffn_dim]
  Activations activated_;             // [the same, expert_ffn_dim]
  AlignedBuffer<float> projected_;    // [the same, hidden_size]
  std::vector<MatMulPart> parts_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_EXPERTS_H_
