// Sums of four products of bytes, by the instruction of byte_dot.h. Included
// once per Highway target.

#if defined(GEMMAKV_OPS_BYTE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_BYTE_DOT_INL_H_
#undef GEMMAKV_OPS_BYTE_DOT_INL_H_
#else
#define GEMMAKV_OPS_BYTE_DOT_INL_H_
#endif

#include <type_traits>

#include "hwy/highway.h"
#include "ops/byte_dot.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Whether kernels of this target may take another instruction than its own.
inline constexpr bool kHasByteDots =
    GKV_HAVE_BYTE_DOT && HWY_TARGET == HWY_AVX2;

template <ByteDot kDot>
using ByteDotConstant = std::integral_constant<ByteDot, kDot>;

// fn(ByteDotConstant) with the one to be used now.
template <class Fn>
HWY_INLINE void WithCurrentByteDot(const Fn& fn) {
  if constexpr (kHasByteDots) {
    [[maybe_unused]] const ByteDot current = CurrentByteDot();
#if GKV_HAVE_AVX_VNNI
    if (current == ByteDot::kAvxVnni) {
      return fn(ByteDotConstant<ByteDot::kAvxVnni>());
    }
#endif
#if GKV_HAVE_AVX512_VNNI
    if (current == ByteDot::kAvx512Vnni) {
      return fn(ByteDotConstant<ByteDot::kAvx512Vnni>());
    }
#endif
  }
  fn(ByteDotConstant<ByteDot::kOfTarget>());
}

// sum + the products of 4 adjacent bytes each, unsigned by signed. Exact but
// for the instruction of AVX2, where two products must fit 16 bits.
template <ByteDot kDot, class VU8, class VI8, class VI32>
HWY_INLINE VI32 AddByteDot(VU8 u, VI8 s, VI32 sum) {
  if constexpr (kDot == ByteDot::kOfTarget) {
    return hwy::HWY_NAMESPACE::SumOfMulQuadAccumulate(
        hwy::HWY_NAMESPACE::DFromV<VI32>(), u, s, sum);
  } else {
#if GKV_HAVE_BYTE_DOT && HWY_TARGET == HWY_AVX2
    if constexpr (kDot == ByteDot::kAvxVnni) {
      asm("%{vex%} vpdpbusd %2, %1, %0"
          : "+x"(sum.raw)
          : "x"(u.raw), "x"(s.raw));
    } else {
      asm("%{evex%} vpdpbusd %2, %1, %0"
          : "+x"(sum.raw)
          : "x"(u.raw), "x"(s.raw));
    }
#endif
    return sum;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_BYTE_DOT_INL_H_
