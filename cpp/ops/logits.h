#ifndef GEMMAKV_OPS_LOGITS_H_
#define GEMMAKV_OPS_LOGITS_H_

#include <cstddef>
#include <cstdint>
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

// log(sum(exp(logits))); -inf if every logit is -inf or NaN, +inf if one is.
float LogSumExp(const float* logits, size_t size);

// The k largest in descending order of logit, ascending id among equals;
// shorter when fewer than k logits are above -inf. Does not copy the row.
std::vector<ScoredToken> TopK(const float* logits, size_t size, size_t k);

// out[i] = exp((logits[i] - max) * inverse_temperature). NaN and -inf give 0;
// what equals `max` gives exactly 1, so that with logits of +inf those share
// all mass equally. Requires: no logit exceeds max.
void ExpShifted(const float* logits, float max, float inverse_temperature,
                size_t size, float* out);

// What the values of ExpShifted sum up to in each partition of so many tokens,
// [ceil(size / kExpSumPartition)], without storing them. Same requirement.
inline constexpr size_t kExpSumPartition = 1024;
std::vector<double> ExpSums(const float* logits, float max,
                            float inverse_temperature, size_t size);

}  // namespace gkv

#endif  // GEMMAKV_OPS_LOGITS_H_
