#include "engine/parallel_logits.h"

#include <algorithm>
#include <limits>

#include "base/rounding.h"

namespace gkv {
namespace {

// Whole partitions, and long enough to be worth a task: a few microseconds.
constexpr size_t kStretch = 16 * kExpSumPartition;

// Calls fn(stretch, its first token, its number of tokens) for all stretches.
// fn must not throw.
template <typename Fn>
void ForStretches(size_t size, ThreadPool* pool, const Fn& fn) {
  const size_t stretches = CeilDiv(size, kStretch);
  const auto run = [&](size_t i, size_t) {
    fn(i, i * kStretch, std::min(kStretch, size - i * kStretch));
  };
  if (pool != nullptr) return pool->Run(stretches, run);
  for (size_t i = 0; i < stretches; ++i) run(i, 0);
}

}  // namespace

ScoredToken ArgMax(std::span<const float> logits, ThreadPool* pool) {
  std::vector<ScoredToken> found(CeilDiv(logits.size(), kStretch));
  ForStretches(logits.size(), pool, [&](size_t i, size_t begin, size_t count) {
    found[i] = ArgMax(logits.data() + begin, count);
    if (found[i].id >= 0) found[i].id += static_cast<int32_t>(begin);
  });
  ScoredToken best{-1, -std::numeric_limits<float>::infinity()};
  for (const ScoredToken& token : found) {
    // Of equal logits, the first counts.
    if (token.id >= 0 && (best.id < 0 || token.logit > best.logit)) {
      best = token;
    }
  }
  return best;
}

std::vector<double> ExpSums(std::span<const float> logits, float max,
                            float inverse_temperature, ThreadPool* pool) {
  std::vector<double> sums(CeilDiv(logits.size(), kExpSumPartition));
  ForStretches(logits.size(), pool, [&](size_t, size_t begin, size_t count) {
    ExpSums(logits.data() + begin, max, inverse_temperature, count,
            sums.data() + begin / kExpSumPartition);
  });
  return sums;
}

}  // namespace gkv
