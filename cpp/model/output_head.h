#ifndef GEMMAKV_MODEL_OUTPUT_HEAD_H_
#define GEMMAKV_MODEL_OUTPUT_HEAD_H_

#include <cstddef>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/weights/weights.h"

namespace gkv {

// From the residual stream to logits: the final norm, the product with the
// vocabulary's weights, the soft cap.
//
// With quantized weights the input has two planes of 8 bits (activations.h).
// A row of which only the largest logit matters is computed with the first
// plane and, where a bound on what the second one can add leaves a logit in
// the race, with both. The winner is exactly that of the full row.
class OutputHead {
 public:
  struct Row {
    const float* x;  // [hidden_size]
    float* logits;   // [vocab_size]
    // Only which logit is the largest matters, with ties going to the lowest
    // id, and its value. The others may be anything below it.
    bool argmax_only;
  };

  // No argument is owned; all must outlive this.
  OutputHead(const ModelConfig& config, const Weights& weights,
             ThreadPool& pool);

  // Not thread-safe. The bits of a row depend on its x and argmax_only alone.
  // Throws std::bad_alloc and what
  // PackedMatrix::RequireSound throws.
  void Compute(std::span<const Row> rows);

 private:
  struct Stretch;

  void Prepare(std::span<const Row> rows);
  void Screen();
  void Multiply(size_t both);
  void StoreRow(const Stretch& stretch, size_t row, size_t both);
  void Complete(size_t row);
  void NormGroups();
  float SecondPlaneNorm(size_t row);

  const ModelConfig& config_;
  const Weights& weights_;
  const PackedMatrix& matrix_;
  ThreadPool& pool_;

  std::vector<Row> rows_;        // those that need both planes everywhere first
  Activations input_;            // [rows, hidden_size]
  AlignedBuffer<float> parts_;   // [threads, planes, rows, stretch]
  std::vector<float> group_norms_;  // [groups] once it was needed
  // Of rows that are screened: the largest first-plane product of each group,
  // and how much the second plane can change a product in all.
  AlignedBuffer<float> group_max_;   // [rows, groups]
  std::vector<float> second_norms_;  // [rows]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_OUTPUT_HEAD_H_
