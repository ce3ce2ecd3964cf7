// Sixteen values at a time on every target: one, two or four vectors. Included
// once per Highway target.

#if defined(GEMMAKV_OPS_VECTOR16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_VECTOR16_INL_H_
#undef GEMMAKV_OPS_VECTOR16_INL_H_
#else
#define GEMMAKV_OPS_VECTOR16_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32x16Tag = hn::CappedTag<float, 16>;
using F32Vector = hn::Vec<F32x16Tag>;
inline constexpr size_t kVectorLanes = HWY_MAX_LANES_D(F32x16Tag);
inline constexpr size_t kVectorsPer16 = 16 / kVectorLanes;

// Calls fn(offset, count) for consecutive vectors of [0, size): count is
// kVectorLanes but for the last one, which may be shorter.
template <typename Fn>
HWY_INLINE void ForVectors(size_t size, const Fn& fn) {
  size_t i = 0;
  for (; i + kVectorLanes <= size; i += kVectorLanes) fn(i, kVectorLanes);
  if (i < size) fn(i, size - i);
}

// Missing lanes are zero.
HWY_INLINE F32Vector LoadUpTo(const float* x, size_t count) {
  const F32x16Tag d;
  return count == kVectorLanes ? hn::LoadU(d, x) : hn::LoadN(d, x, count);
}

HWY_INLINE void StoreUpTo(F32Vector v, float* x, size_t count) {
  const F32x16Tag d;
  if (count == kVectorLanes) {
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

// Sum over i of term(x[i]) with sixteen partials by i % 16. `term` maps vectors
// (vector, accumulator) to the new accumulator and must leave the accumulator
// as it is for zero lanes.
template <typename Term>
HWY_INLINE float Sum16(const float* HWY_RESTRICT x, size_t size,
                       const Term& term) {
  const F32x16Tag d;
  F32Vector acc[kVectorsPer16];
  for (size_t v = 0; v < kVectorsPer16; ++v) acc[v] = hn::Zero(d);
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      acc[v] = term(hn::LoadU(d, x + i + v * kVectorLanes), acc[v]);
    }
  }
  if (i < size) {
    HWY_ALIGN float tail[16] = {};
    for (size_t j = i; j < size; ++j) tail[j - i] = x[j];
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      acc[v] = term(hn::Load(d, tail + v * kVectorLanes), acc[v]);
    }
  }
  HWY_ALIGN float partials[16];
  for (size_t v = 0; v < kVectorsPer16; ++v) {
    hn::Store(acc[v], d, partials + v * kVectorLanes);
  }
  return JoinSums(partials);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_VECTOR16_INL_H_
