#ifndef GEMMAKV_OPS_LOGITS_H_
#define GEMMAKV_OPS_LOGITS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Reductions over one row of logits [vocab_size]. Their order is fixed, so
// results do not depend on target (with fused multiply-add), threads or batch.
// NaN counts as -inf everywhere; ties go to the lowest id.

namespace gkv {

struct ScoredToken {
  int32_t id;
  float logit;
};

// Returns the largest logit. Its id is -1 if every logit is -inf or NaN.
ScoredToken ArgMax(const float* logits, size_t size);

// Writes the largest of each of `groups` groups of `group` logits; -inf if
// there is none. Requires: group is a multiple of 16.
void MaximaOfGroups(const float* logits, size_t group, size_t groups,
                    float* maxima);

// Returns log(sum(exp(logits))): -inf if every logit is -inf or NaN, +inf if
// one is +inf.
float LogSumExp(const float* logits, size_t size);

// Tokens with their logits, in ascending order of id.
struct TokenList {
  std::vector<int32_t> ids;
  std::vector<float> logits;
};

// Sorts `tokens` by id and copies them to `list`.
void ListById(std::vector<std::pair<int32_t, float>>& tokens, TokenList& list);

// Replaces `list` by the tokens whose logits are above -inf and at least
// `floor`.
void TokensFrom(const float* logits, size_t size, float floor, TokenList& list);

// The largest logit, -inf if there is none, and a floor. None of the k largest
// logits is below the floor, and few others are above it (up to half as many
// again, in random order). It is -inf if k is more than a sixteenth of all.
// Requires: k > 0.
struct LargestBounds {
  float max;
  float floor;
};
LargestBounds BoundsOfLargest(const float* logits, size_t size, size_t k);

// Returns that floor; for k = 1 the largest logit. Requires: k > 0.
float FloorOfLargest(const float* logits, size_t size, size_t k);

// Writes the bin of each logit. `bins` bins of equal width divide the range
// from `max` down to `floor`, or down to the smallest logit if that is larger.
// The bin is 0 at max, and, up to rounding, bins - 1 from the other end on and
// for NaN. A larger logit is never in a later bin. Requires: no logit exceeds
// max.
void RankBins(const float* logits, size_t size, float max, float floor,
              size_t bins, int32_t* out);

// out[i] = exp((logits[i] - max) * inverse_temperature), never larger for a
// smaller logit. NaN and -inf give 0, and so does a result below 1.6e-38. A
// logit that equals `max` gives exactly 1, so logits of +inf share all mass
// equally. Requires: no logit exceeds max.
void ExpShifted(const float* logits, float max, float inverse_temperature,
                size_t size, float* out);

// Writes the sum of the values of ExpShifted for each partition of this many
// tokens, without storing the values: sums [ceil(size / kExpSumPartition)].
// Requires: no logit exceeds max.
inline constexpr size_t kExpSumPartition = 1024;
void ExpSums(const float* logits, float max, float inverse_temperature,
             size_t size, double* sums);

}  // namespace gkv

#endif  // GEMMAKV_OPS_LOGITS_H_
