#ifndef GEMMAKV_OPS_LOGITS_H_
#define GEMMAKV_OPS_LOGITS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Reductions over one row of logits [vocab_size]. Fixed order: results do not
// depend on target (with fused multiply-add), threads or batch. NaN counts as
// -inf everywhere; ties go to the lowest id.

namespace gkv {

struct ScoredToken {
  int32_t id;
  float logit;
};

// The largest logit. id is -1 if every logit is -inf or NaN.
ScoredToken ArgMax(const float* logits, size_t size);

// The largest of each of `groups` groups of `group` logits; -inf if there is
// none. Requires: group is a multiple of 16.
void MaximaOfGroups(const float* logits, size_t group, size_t groups,
                    float* maxima);

// log(sum(exp(logits))); -inf if every logit is -inf or NaN, +inf if one is.
float LogSumExp(const float* logits, size_t size);

// Tokens with their logits, in ascending order of id.
struct TokenList {
  std::vector<int32_t> ids;
  std::vector<float> logits;
};

// Sorts tokens by id; `list` becomes these.
void ListById(std::vector<std::pair<int32_t, float>>& tokens, TokenList& list);

// Replaces `list` by the tokens whose logits are above -inf and at least
// `floor`.
void TokensFrom(const float* logits, size_t size, float floor, TokenList& list);

// The largest logit, -inf if there is none, and a floor: a value that the k
// largest are not below, and few others above (up to half as many again in
// random order). The floor is -inf if k is more than a sixteenth of all.
// Requires: k > 0.
struct LargestBounds {
  float max;
  float floor;
};
LargestBounds BoundsOfLargest(const float* logits, size_t size, size_t k);

// A value that the k largest logits are not below, and few others above; for
// k = 1 the largest. Requires: k > 0.
float FloorOfLargest(const float* logits, size_t size, size_t k);

// The bins that logits fall into when `bins` of equal width divide what is
// between `max` and `floor`, or the smallest logit if that is larger: 0 at max,
// up to rounding bins - 1 from the other end on and for NaN. A larger logit is
// never in a later bin. Requires: no logit exceeds max.
void RankBins(const float* logits, size_t size, float max, float floor,
              size_t bins, int32_t* out);

// out[i] = exp((logits[i] - max) * inverse_temperature), never larger for a
// smaller logit. NaN, -inf and what is below 1.6e-38 give 0; what equals `max`
// gives exactly 1, so that with logits of +inf those share all mass equally.
// Requires: no logit exceeds max.
void ExpShifted(const float* logits, float max, float inverse_temperature,
                size_t size, float* out);

// What the values of ExpShifted sum up to in each partition of so many tokens,
// without storing them: sums [ceil(size / kExpSumPartition)]. Same requirement.
inline constexpr size_t kExpSumPartition = 1024;
void ExpSums(const float* logits, float max, float inverse_temperature,
             size_t size, double* sums);

}  // namespace gkv

#endif  // GEMMAKV_OPS_LOGITS_H_
