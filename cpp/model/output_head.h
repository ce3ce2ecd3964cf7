#ifndef GEMMAKV_MODEL_OUTPUT_HEAD_H_
#define GEMMAKV_MODEL_OUTPUT_HEAD_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/weights/weights.h"
#include "ops/logits.h"

namespace gkv {

// Computes logits from the residual stream: the final norm, the product with
// the vocabulary's weights, the soft cap.
//
// With quantized weights the input has two planes of 8 bits (activations.h).
// Some rows want only their largest logits. Where there are two such rows or
// more, these are multiplied with the first plane. A bound on what the second
// one can add then leaves a few groups of tokens in the race, and these are
// multiplied with both planes. The logits are exactly the largest of the full
// row, which is written nowhere.
class OutputHead {
 public:
  struct Row {
    const float* x;  // [hidden_size]
    float* logits;   // [vocab_size], or null:
    // Only the `count` largest logits are wanted, with ties going to the lowest
    // ids. They are written to `largest`, which may get some of the others,
    // too, but none of -inf or NaN.
    TokenList* largest = nullptr;
    size_t count = 0;
  };

  // No argument is owned; all must outlive this.
  OutputHead(const ModelConfig& config, const Weights& weights,
             ThreadPool& pool);

  // Not thread-safe. The bits of a logit depend on its row's x alone. Throws
  // std::bad_alloc and what PackedMatrix::RequireSound throws.
  void Compute(std::span<const Row> rows);

  // Returns the number of groups of 16 tokens that the last call has multiplied
  // once more, for rows of which only the largest logits were wanted.
  size_t contenders() const { return num_contenders_; }

 private:
  struct Stretch;

  // Groups of tokens that may have some of a row's largest logits, by ascending
  // number.
  struct Contenders {
    TokenList groups;           // their numbers; its logits do not matter
    std::vector<float> logits;  // [groups, kRowGroup]
  };
  // The state of a row of which only the largest logits are wanted.
  struct Race {
    size_t row;
    float floor;  // the largest product of a leader is at least this
    Contenders leaders, chasers;
  };
  struct Contender {
    size_t row, group;
    float* logits;
  };

  void Prepare(std::span<const Row> rows);
  void Screen(size_t whole);
  void Multiply(size_t whole, size_t both);
  void StoreRow(const Stretch& stretch, size_t row) const;
  void NoteMaxima(Stretch& stretch, size_t row, float* maxima) const;
  void ListLargest(size_t whole);
  void PairPlanes(size_t whole);
  void BoundChasers(const Race& race, float* maxima) const;
  float FloorOfChasers(const Race& race) const;
  void Complete(size_t whole, std::span<Race> races, Contenders Race::*which);
  void Complete(size_t whole, const Contender& contender, uint8_t* scratch);
  void Cap(Contenders& those) const;
  void List(Race& race);
  void NormGroups();
  float SecondPlaneNorm(size_t row);
  bool HasBothPlanes(const Stretch& stretch, size_t row) const;

  const ModelConfig& config_;
  const Weights& weights_;
  const PackedMatrix& matrix_;
  ThreadPool& pool_;

  std::vector<Row> rows_;       // first those of which all logits are wanted
  Activations input_;           // [rows, hidden_size]
  AlignedBuffer<float> parts_;  // [threads, planes, rows, stretch]
  std::vector<float> group_norms_;  // [groups], or empty until it is needed

  // For rows of which only the largest logits are wanted: the largest product
  // of each group and, if that is the first plane's, the norm of the second
  // plane, which bounds how much it can change a product.
  AlignedBuffer<float> group_max_;   // [those rows, groups]
  std::vector<float> second_norms_;  // [rows], or empty
  Activations pairs_;                // [those rows and planes, hidden_size]
  std::vector<Race> races_;          // [those rows at least]
  std::vector<Contender> contenders_;
  size_t num_contenders_ = 0;
  std::vector<std::pair<int32_t, float>> listed_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_OUTPUT_HEAD_H_
