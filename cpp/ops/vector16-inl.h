// Sixteen values at a time on every target: one, two or four vectors. Included
// once per Highway target.

#if defined(GEMMAKV_OPS_VECTOR16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_VECTOR16_INL_H_
#undef GEMMAKV_OPS_VECTOR16_INL_H_
#else
#define GEMMAKV_OPS_VECTOR16_INL_H_
#endif

#include <cstddef>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Bits and the list of targets are known for this version alone.
static_assert(HWY_MAJOR == 1 && HWY_MINOR == 2 && HWY_PATCH == 0);

using DF32 = hn::CappedTag<float, 16>;
using DI32 = hn::RebindToSigned<DF32>;
using DU32 = hn::RebindToUnsigned<DF32>;
using VF32 = hn::Vec<DF32>;
using VI32 = hn::Vec<DI32>;
inline constexpr size_t kLanes = HWY_MAX_LANES_D(DF32);
inline constexpr size_t kVectorsPer16 = 16 / kLanes;

HWY_INLINE VF32 MinusInfinity() {
  return hn::Set(DF32(), -std::numeric_limits<float>::infinity());
}

// The attributes of lambdas that must be inlined, however large they are. GCC
// would call the last one of several, and then vectors live in memory. Under
// sanitizers that is of no use, and compiling takes minutes.
#ifndef GKV_INLINE_ATTR
#if HWY_IS_ASAN || HWY_IS_TSAN || HWY_IS_UBSAN
#define GKV_INLINE_ATTR HWY_ATTR
#else
#define GKV_INLINE_ATTR HWY_ATTR __attribute__((always_inline))
#endif
#endif

// Calls fn(offset, count) for consecutive vectors of [0, size). `count` is
// kLanes, or less for the last one.
template <typename Fn>
HWY_INLINE void ForVectors(size_t size, const Fn& fn) {
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) fn(i, kLanes);
  if (i < size) fn(i, size - i);
}

// Loads `count` values; the other lanes are zero.
HWY_INLINE VF32 LoadUpTo(const float* x, size_t count) {
  const DF32 d;
  return count == kLanes ? hn::LoadU(d, x) : hn::LoadN(d, x, count);
}

HWY_INLINE void StoreUpTo(VF32 v, float* x, size_t count) {
  const DF32 d;
  if (count == kLanes) {
    hn::StoreU(v, d, x);
  } else {
    hn::StoreN(v, d, x, count);
  }
}

// Joins sixteen partial sums in one fixed order.
HWY_INLINE float JoinSums(float* HWY_RESTRICT partials) {
  for (size_t width = 8; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) partials[i] += partials[i + width];
  }
  return partials[0];
}

// Returns the sum over i of term(x[i]), with sixteen partials by i % 16. `term`
// maps (vector, accumulator) to the new accumulator, and must leave the
// accumulator as it is for zero lanes.
template <typename Term>
HWY_INLINE float Sum16(const float* HWY_RESTRICT x, size_t size,
                       const Term& term) {
  const DF32 d;
  VF32 acc[kVectorsPer16];
  for (size_t v = 0; v < kVectorsPer16; ++v) acc[v] = hn::Zero(d);
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      acc[v] = term(hn::LoadU(d, x + i + v * kLanes), acc[v]);
    }
  }
  if (i < size) {
    HWY_ALIGN float tail[16] = {};
    for (size_t j = i; j < size; ++j) tail[j - i] = x[j];
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      acc[v] = term(hn::Load(d, tail + v * kLanes), acc[v]);
    }
  }
  HWY_ALIGN float partials[16];
  for (size_t v = 0; v < kVectorsPer16; ++v) {
    hn::Store(acc[v], d, partials + v * kLanes);
  }
  return JoinSums(partials);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_VECTOR16_INL_H_
