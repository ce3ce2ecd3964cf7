#include "ops/logits.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logits.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// The number of exponentials that are summed in float. These sums are added in
// double, in order.
constexpr size_t kSumPartition = 4096;

// Returns `v` with -inf in place of NaN.
HWY_INLINE VF32 ReplaceNaN(VF32 v) {
  return hn::IfThenElse(hn::IsNaN(v), MinusInfinity(), v);
}

float MaxImpl(const float* logits, size_t size) {
  const DF32 d;
  constexpr size_t kUnroll = 4;
  VF32 max[kUnroll];
  for (auto& m : max) m = MinusInfinity();
  size_t i = 0;
  for (; i + kUnroll * kLanes <= size; i += kUnroll * kLanes) {
    for (size_t u = 0; u < kUnroll; ++u) {
      max[u] =
          hn::Max(max[u], ReplaceNaN(hn::LoadU(d, logits + i + u * kLanes)));
    }
  }
  float result = hn::ReduceMax(
      d, hn::Max(hn::Max(max[0], max[1]), hn::Max(max[2], max[3])));
  for (; i < size; ++i) {
    if (logits[i] > result) result = logits[i];
  }
  return result;
}

// Writes the maximum of each of `groups` groups of `group` values, -inf if none
// is above that. Requires: group % 16 == 0.
void GroupMaxImpl(const float* logits, size_t group, size_t groups,
                  float* maxima) {
  const DF32 d;
  for (size_t g = 0; g < groups; ++g, logits += group) {
    VF32 max = MinusInfinity();
    for (size_t i = 0; i < group; i += kLanes) {
      max = hn::Max(max, ReplaceNaN(hn::LoadU(d, logits + i)));
    }
    maxima[g] = hn::ReduceMax(d, max);
  }
}

// Returns the index of the first value equal to `wanted`, or `size`.
size_t FindImpl(const float* logits, size_t size, float wanted) {
  const DF32 d;
  const auto w = hn::Set(d, wanted);
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const intptr_t found =
        hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits + i), w));
    if (found >= 0) return i + static_cast<size_t>(found);
  }
  while (i < size && logits[i] != wanted) ++i;
  return i;
}

// Writes the logits that are at least `floor`, and their ids, to `found` and
// `ids`, which have room for all and one vector more. Returns their number.
// `first` is the id of logits[0]. NaN is left out.
size_t TokensFromImpl(const float* logits, size_t size, float floor,
                      int32_t first, int32_t* ids, float* found) {
  const DF32 d;
  const DI32 di;
  const auto f = hn::Set(d, floor);
  size_t n = 0;
  const auto append = [&](size_t i) HWY_ATTR {
    const auto v = hn::LoadU(d, logits + i);
    const auto mask = hn::Ge(v, f);
    const auto id = hn::Iota(di, first + static_cast<int32_t>(i));
    hn::StoreU(hn::Compress(v, mask), d, found + n);
    hn::StoreU(hn::Compress(id, hn::RebindMask(di, mask)), di, ids + n);
    n += hn::CountTrue(d, mask);
  };
  size_t i = 0;
  // Most groups have nothing; whether a vector of a group has something is
  // not worth a branch.
  constexpr size_t kGroup = 4 * kLanes;
  for (; i + kGroup <= size; i += kGroup) {
    const auto any = [&](size_t u) HWY_ATTR {
      return hn::Ge(hn::LoadU(d, logits + i + u * kLanes), f);
    };
    if (hn::AllFalse(d,
                     hn::Or(hn::Or(any(0), any(1)), hn::Or(any(2), any(3))))) {
      continue;
    }
    for (size_t u = 0; u < 4; ++u) append(i + u * kLanes);
  }
  for (; i < size; ++i) {
    if (!(logits[i] >= floor)) continue;
    ids[n] = first + static_cast<int32_t>(i);
    found[n++] = logits[i];
  }
  return n;
}

void RankBinsImpl(const float* logits, size_t size, float max, float floor,
                  size_t bins, int32_t* out) {
  const DF32 d;
  const DI32 di;
  const auto m = hn::Set(d, max);
  const auto f = hn::Set(d, floor);
  auto min = m;
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto v = count == kLanes ? hn::LoadU(d, logits + i)
                                   : hn::LoadNOr(m, d, logits + i, count);
    min = hn::Min(min, hn::IfThenElse(hn::Gt(v, f), v, f));
  });
  const auto l = hn::Set(d, static_cast<float>(bins - 1));
  // If the range is empty, all land in the last bin.
  const auto s = hn::Div(l, hn::Set(d, max - hn::ReduceMin(d, min)));
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto x = hn::Mul(hn::Sub(m, LoadUpTo(logits + i, count)), s);
    const auto bin =
        hn::ConvertInRangeTo(di, hn::IfThenElse(hn::Lt(x, l), x, l));
    if (count == kLanes) {
      hn::StoreU(bin, di, out + i);
    } else {
      hn::StoreN(bin, di, out + i, count);
    }
  });
}

// Returns exp(x) for x <= 0; 0 for NaN and where it would not be a normal
// float. These are the steps of hn::Exp, with the same bits, but for those that
// such an x does not need. They take two thirds of the time.
HWY_INLINE VF32 ExpNotPositive(VF32 x) {
  const DF32 d;
  const DI32 di;
  const auto c = [](float value) HWY_ATTR { return hn::Set(DF32(), value); };
  // exp(x) = 2^q * exp(r), r = x - q * log(2); out of range q does not matter.
  const auto q = hn::ConvertInRangeTo(
      di, hn::MulAdd(x, c(1.442695040888963407f), c(-0.5f)));
  const auto qf = hn::ConvertTo(d, q);
  auto r = hn::MulAdd(qf, c(-0.693145751953125f), x);
  r = hn::MulAdd(qf, c(-1.428606765330187045e-6f), r);
  // (exp(r) - 1 - r) / r^2
  const auto r2 = hn::Mul(r, r);
  const auto low =
      hn::MulAdd(r2,
                 hn::MulAdd(c(0.00833336077630519866943359f), r,
                            c(0.0416664853692054748535156f)),
                 hn::MulAdd(c(0.166666671633720397949219f), r, c(0.5f)));
  const auto high = hn::MulAdd(c(0.000198527617612853646278381f), r,
                               c(0.00139304355252534151077271f));
  const auto quotient = hn::MulAdd(hn::Mul(r2, r2), high, low);
  const auto e = hn::Add(hn::MulAdd(quotient, r2, r), c(1.0f));
  const auto scaled =
      hn::BitCast(d, hn::Add(hn::BitCast(di, e), hn::ShiftLeft<23>(q)));
  return hn::IfThenElseZero(hn::Ge(x, c(-87.0f)), scaled);
}

// Returns exp(factor * (v - max)), at most 1. NaN and -inf give 0, and the
// maximum itself exactly 1; without kFinite also if max or factor is infinite.
template <bool kFinite>
HWY_INLINE VF32 ShiftedExp(VF32 v, VF32 max, VF32 factor) {
  const auto e = ExpNotPositive(hn::Mul(hn::Sub(v, max), factor));
  if constexpr (kFinite) return e;
  const auto one_at_max =
      hn::IfThenElse(hn::Eq(v, max), hn::Set(DF32(), 1.0f), e);
  return hn::IfThenElseZero(hn::Gt(v, MinusInfinity()), one_at_max);
}

// Calls fn(std::bool_constant), true if both are finite.
template <typename Fn>
HWY_INLINE void WithFinite(float max, float factor, const Fn& fn) {
  if (max - max == 0 && factor - factor == 0) {
    fn(std::true_type());
  } else {
    fn(std::false_type());
  }
}

void ExpShiftedImpl(const float* logits, float max, float factor, size_t size,
                    float* out) {
  const DF32 d;
  const auto m = hn::Set(d, max);
  const auto f = hn::Set(d, factor);
  WithFinite(max, factor, [&](auto finite) HWY_ATTR {
    ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
      StoreUpTo(ShiftedExp<finite()>(LoadUpTo(logits + i, count), m, f),
                out + i, count);
    });
  });
}

// Returns sum(exp(factor * (logits - max))) of up to some thousand values.
template <bool kFinite>
HWY_INLINE double ExpSum(const float* logits, size_t count, VF32 max,
                         VF32 factor) {
  const size_t whole = count / 16 * 16;
  const auto term = [&](VF32 v, VF32 acc) HWY_ATTR {
    return hn::Add(acc, ShiftedExp<kFinite>(v, max, factor));
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
  const DF32 d;
  const auto m = hn::Set(d, max);
  const auto f = hn::Set(d, factor);
  WithFinite(max, factor, [&](auto finite) HWY_ATTR {
    for (size_t begin = 0; begin < size; begin += kExpSumPartition) {
      const size_t count = HWY_MIN(kExpSumPartition, size - begin);
      *sums++ = ExpSum<finite()>(logits + begin, count, m, f);
    }
  });
}

float LogSumExpImpl(const float* logits, size_t size, float max) {
  const DF32 d;
  const auto m = hn::Set(d, max);
  const auto one = hn::Set(d, 1.0f);
  double total = 0;
  for (size_t begin = 0; begin < size; begin += kSumPartition) {
    total += ExpSum<true>(logits + begin, HWY_MIN(kSumPartition, size - begin),
                          m, one);
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

// Sizes of the groups whose maxima BoundsOfLargest takes.
constexpr size_t kMinGroup = 16;
constexpr size_t kMaxGroup = 1024;

// The number of tokens that are looked at between two growths of a list.
constexpr size_t kListPartition = 1024;
constexpr size_t kVectorRoom = 16;

}  // namespace

HWY_EXPORT(MaxImpl);
HWY_EXPORT(GroupMaxImpl);
HWY_EXPORT(FindImpl);
HWY_EXPORT(TokensFromImpl);
HWY_EXPORT(RankBinsImpl);
HWY_EXPORT(ExpShiftedImpl);
HWY_EXPORT(LogSumExpImpl);
HWY_EXPORT(ExpSumsImpl);

ScoredToken ArgMax(const float* logits, size_t size) {
  const float max = HWY_DYNAMIC_DISPATCH(MaxImpl)(logits, size);
  if (!(max > -std::numeric_limits<float>::infinity())) return {-1, max};
  const size_t at = HWY_DYNAMIC_DISPATCH(FindImpl)(logits, size, max);
  // Not `max`: whether that is -0 or 0 depends on the number of lanes.
  return {static_cast<int32_t>(at), logits[at]};
}

void MaximaOfGroups(const float* logits, size_t group, size_t groups,
                    float* maxima) {
  HWY_DYNAMIC_DISPATCH(GroupMaxImpl)(logits, group, groups, maxima);
}

float LogSumExp(const float* logits, size_t size) {
  const float max = HWY_DYNAMIC_DISPATCH(MaxImpl)(logits, size);
  if (max - max != 0) return max;  // infinite: nothing to add
  return HWY_DYNAMIC_DISPATCH(LogSumExpImpl)(logits, size, max);
}

void ListById(std::vector<std::pair<int32_t, float>>& tokens,
              TokenList& list) {
  std::sort(tokens.begin(), tokens.end());
  list.ids.clear();
  list.logits.clear();
  for (const auto& [id, logit] : tokens) {
    list.ids.push_back(id);
    list.logits.push_back(logit);
  }
}

void TokensFrom(const float* logits, size_t size, float floor,
                TokenList& list) {
  floor = std::max(floor, std::numeric_limits<float>::lowest());
  list.ids.clear();
  list.logits.clear();
  int32_t ids[kListPartition + kVectorRoom];
  float found[kListPartition + kVectorRoom];
  for (size_t begin = 0; begin < size; begin += kListPartition) {
    const size_t n = HWY_DYNAMIC_DISPATCH(TokensFromImpl)(
        logits + begin, std::min(kListPartition, size - begin), floor,
        static_cast<int32_t>(begin), ids, found);
    list.ids.insert(list.ids.end(), ids, ids + n);
    list.logits.insert(list.logits.end(), found, found + n);
  }
}

// k groups of values have a maximum of at least the k-th largest maximum, so
// no smaller value can be among the k largest.
LargestBounds BoundsOfLargest(const float* logits, size_t size, size_t k) {
  size_t group = kMaxGroup;
  while (group > kMinGroup && size / group < 2 * k) group /= 2;
  const size_t groups = size / group;
  if (groups < k) {
    return {HWY_DYNAMIC_DISPATCH(MaxImpl)(logits, size),
            -std::numeric_limits<float>::infinity()};
  }
  std::vector<float> maxima(groups);
  MaximaOfGroups(logits, group, groups, maxima.data());
  const auto kth = maxima.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(maxima.begin(), kth, maxima.end(), std::greater<>());
  // The values after the last group belong to none.
  const float rest = HWY_DYNAMIC_DISPATCH(MaxImpl)(logits + groups * group,
                                                   size - groups * group);
  return {std::max(rest, *std::max_element(maxima.begin(), kth + 1)), *kth};
}

float FloorOfLargest(const float* logits, size_t size, size_t k) {
  const LargestBounds bounds = BoundsOfLargest(logits, size, k);
  return k == 1 ? bounds.max : bounds.floor;
}

void RankBins(const float* logits, size_t size, float max, float floor,
              size_t bins, int32_t* out) {
  HWY_DYNAMIC_DISPATCH(RankBinsImpl)(logits, size, max, floor, bins, out);
}

void ExpSums(const float* logits, float max, float inverse_temperature,
             size_t size, double* sums) {
  HWY_DYNAMIC_DISPATCH(ExpSumsImpl)
  (logits, max, inverse_temperature, size, sums);
}

void ExpShifted(const float* logits, float max, float inverse_temperature,
                size_t size, float* out) {
  HWY_DYNAMIC_DISPATCH(ExpShiftedImpl)
  (logits, max, inverse_temperature, size, out);
}

}  // namespace gkv

#endif  // HWY_ONCE
