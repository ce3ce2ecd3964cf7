#include "ops/logits.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logits.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Sums of exponentials are taken over so many values in float and then in
// double, in order.
constexpr size_t kSumPartition = 4096;

HWY_INLINE F32Vector MinusInfinity() {
  return hn::Set(F32x16Tag(), -std::numeric_limits<float>::infinity());
}

// NaN counts as -inf.
HWY_INLINE F32Vector Ranked(F32Vector v) {
  return hn::IfThenElse(hn::IsNaN(v), MinusInfinity(), v);
}

float MaxImpl(const float* logits, size_t size) {
  const F32x16Tag d;
  constexpr size_t kUnroll = 4;
  F32Vector max[kUnroll];
  for (auto& m : max) m = MinusInfinity();
  size_t i = 0;
  for (; i + kUnroll * kVectorLanes <= size; i += kUnroll * kVectorLanes) {
    for (size_t u = 0; u < kUnroll; ++u) {
      max[u] =
          hn::Max(max[u], Ranked(hn::LoadU(d, logits + i + u * kVectorLanes)));
    }
  }
  float result = hn::ReduceMax(
      d, hn::Max(hn::Max(max[0], max[1]), hn::Max(max[2], max[3])));
  for (; i < size; ++i) {
    if (logits[i] > result) result = logits[i];
  }
  return result;
}

// The maximum of each of `groups` groups of `group` values, -inf if none is
// above it. Requires: group % 16 == 0.
void GroupMaxImpl(const float* logits, size_t group, size_t groups,
                  float* maxima) {
  const F32x16Tag d;
  for (size_t g = 0; g < groups; ++g, logits += group) {
    F32Vector max = MinusInfinity();
    for (size_t i = 0; i < group; i += kVectorLanes) {
      max = hn::Max(max, Ranked(hn::LoadU(d, logits + i)));
    }
    maxima[g] = hn::ReduceMax(d, max);
  }
}

// Index of the first value equal to `wanted`, or `size`.
size_t FindImpl(const float* logits, size_t size, float wanted) {
  const F32x16Tag d;
  const auto w = hn::Set(d, wanted);
  size_t i = 0;
  for (; i + kVectorLanes <= size; i += kVectorLanes) {
    const intptr_t found =
        hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits + i), w));
    if (found >= 0) return i + static_cast<size_t>(found);
  }
  while (i < size && logits[i] != wanted) ++i;
  return i;
}

// First index in [begin, size) whose value exceeds `threshold`, or `size`.
size_t FindAboveImpl(const float* logits, size_t begin, size_t size,
                     float threshold) {
  const F32x16Tag d;
  const auto t = hn::Set(d, threshold);
  size_t i = begin;
  for (; i + kVectorLanes <= size; i += kVectorLanes) {
    const intptr_t found =
        hn::FindFirstTrue(d, hn::Gt(hn::LoadU(d, logits + i), t));
    if (found >= 0) return i + static_cast<size_t>(found);
  }
  while (i < size && !(logits[i] > threshold)) ++i;
  return i;
}

// exp(factor * (v - max)), at most 1; NaN and -inf give 0. The maximum itself
// gives exactly 1, also if it is infinite.
HWY_INLINE F32Vector ShiftedExp(F32Vector v, F32Vector max, F32Vector factor) {
  const F32x16Tag d;
  const auto exponent = hn::Mul(hn::Sub(v, max), factor);
  // Below this Exp is 0; the bound keeps -inf out of its arithmetic.
  const auto bounded = hn::Max(exponent, hn::Set(d, -200.0f));
  const auto e =
      hn::IfThenElse(hn::Eq(v, max), hn::Set(d, 1.0f), hn::Exp(d, bounded));
  return hn::IfThenElseZero(hn::Gt(v, MinusInfinity()), e);
}

void ExpShiftedImpl(const float* logits, float max, float factor, size_t size,
                    float* out) {
  const F32x16Tag d;
  const auto m = hn::Set(d, max);
  const auto f = hn::Set(d, factor);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(ShiftedExp(LoadUpTo(logits + i, count), m, f), out + i, count);
  });
}

// sum(exp(factor * (logits - max))) of up to some thousand values.
HWY_INLINE double ExpSum(const float* logits, size_t count, F32Vector max,
                         F32Vector factor) {
  const size_t whole = count / 16 * 16;
  const auto term = [&](F32Vector v, F32Vector acc) HWY_ATTR {
    return hn::Add(acc, ShiftedExp(v, max, factor));
  };
  double sum = static_cast<double>(Sum16(logits, whole, term));
  if (whole == count) return sum;
  // Missing values are -inf, not zero.
  HWY_ALIGN float tail[16];
  for (size_t i = 0; i < 16; ++i) {
    tail[i] = whole + i < count ? logits[whole + i]
                                : -std::numeric_limits<float>::infinity();
  }
  return sum + static_cast<double>(Sum16(tail, 16, term));
}

void ExpSumsImpl(const float* logits, float max, float factor, size_t size,
                 double* sums) {
  const F32x16Tag d;
  const auto m = hn::Set(d, max);
  const auto f = hn::Set(d, factor);
  for (size_t begin = 0; begin < size; begin += kExpSumPartition) {
    *sums++ = ExpSum(logits + begin, HWY_MIN(kExpSumPartition, size - begin),
                     m, f);
  }
}

float LogSumExpImpl(const float* logits, size_t size, float max) {
  const F32x16Tag d;
  const auto m = hn::Set(d, max);
  const auto one = hn::Set(d, 1.0f);
  double total = 0;
  for (size_t begin = 0; begin < size; begin += kSumPartition) {
    total += ExpSum(logits + begin, HWY_MIN(kSumPartition, size - begin), m,
                    one);
  }
  const hn::CappedTag<double, 1> d1;
  const double log = hn::GetLane(hn::Log(d1, hn::Set(d1, total)));
  return static_cast<float>(static_cast<double>(max) + log);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {
namespace {

// Sizes of the groups whose maxima TopK takes.
constexpr size_t kMinGroup = 16;
constexpr size_t kMaxGroup = 1024;

// Whether a comes before b in the result of TopK.
bool Before(const ScoredToken& a, const ScoredToken& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

HWY_EXPORT(MaxImpl);
HWY_EXPORT(GroupMaxImpl);
HWY_EXPORT(FindImpl);
HWY_EXPORT(FindAboveImpl);
HWY_EXPORT(ExpShiftedImpl);
HWY_EXPORT(LogSumExpImpl);
HWY_EXPORT(ExpSumsImpl);

ScoredToken ArgMax(const float* logits, size_t size) {
  const float max = HWY_DYNAMIC_DISPATCH(MaxImpl)(logits, size);
  if (!(max > -std::numeric_limits<float>::infinity())) return {-1, max};
  const size_t at = HWY_DYNAMIC_DISPATCH(FindImpl)(logits, size, max);
  // Not `max`: which of -0 and 0 it is depends on the number of lanes.
  return {static_cast<int32_t>(at), logits[at]};
}

float LogSumExp(const float* logits, size_t size) {
  const float max = HWY_DYNAMIC_DISPATCH(MaxImpl)(logits, size);
  if (max - max != 0) return max;  // infinite: nothing to add
  return HWY_DYNAMIC_DISPATCH(LogSumExpImpl)(logits, size, max);
}

// k groups of values have a maximum of at least the k-th largest maximum, so no
// smaller value can be among the k largest: one look at the row leaves little
// more than k values to sort.
std::vector<ScoredToken> TopK(const float* logits, size_t size, size_t k) {
  k = std::min(k, size);
  if (k == 0) return {};
  size_t group = kMaxGroup;
  while (group > kMinGroup && size / group < 2 * k) group /= 2;
  const size_t groups = size / group;  // what is left over has no maximum
  float threshold = -std::numeric_limits<float>::infinity();
  if (groups >= k) {
    std::vector<float> maxima(groups);
    HWY_DYNAMIC_DISPATCH(GroupMaxImpl)(logits, group, groups, maxima.data());
    std::nth_element(maxima.begin(),
                     maxima.begin() + static_cast<std::ptrdiff_t>(k - 1),
                     maxima.end(), std::greater<>());
    // Values equal to it count too.
    threshold = std::nextafter(maxima[k - 1],
                               -std::numeric_limits<float>::infinity());
  }
  std::vector<ScoredToken> found;
  for (size_t i = 0; (i = HWY_DYNAMIC_DISPATCH(FindAboveImpl)(
                          logits, i, size, threshold)) < size;
       ++i) {
    found.push_back({static_cast<int32_t>(i), logits[i]});
  }
  if (found.size() > k) {
    std::nth_element(found.begin(),
                     found.begin() + static_cast<std::ptrdiff_t>(k),
                     found.end(), Before);
    found.resize(k);
  }
  std::sort(found.begin(), found.end(), Before);
  return found;
}

std::vector<double> ExpSums(const float* logits, float max,
                            float inverse_temperature, size_t size) {
  std::vector<double> sums((size + kExpSumPartition - 1) / kExpSumPartition);
  HWY_DYNAMIC_DISPATCH(ExpSumsImpl)
  (logits, max, inverse_temperature, size, sums.data());
  return sums;
}

void ExpShifted(const float* logits, float max, float inverse_temperature,
                size_t size, float* out) {
  HWY_DYNAMIC_DISPATCH(ExpShiftedImpl)
  (logits, max, inverse_temperature, size, out);
}

}  // namespace gkv

#endif  // HWY_ONCE
