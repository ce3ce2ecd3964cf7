// How products of bytes are summed: policies, one for each kind of processor.
// Included once per Highway target.

#if defined(GEMMAKV_OPS_BYTE_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_BYTE_DOT_INL_H_
#undef GEMMAKV_OPS_BYTE_DOT_INL_H_
#else
#define GEMMAKV_OPS_BYTE_DOT_INL_H_
#endif

#include "hwy/highway.h"
#include "ops/byte_dot.h"

// A policy has
//   AddQuads(u, s, sum)  sum + the products of 4 adjacent bytes, unsigned by
//                        signed, for each lane of 32 bits
//   kPairs               whether kernels of weights had better add products of
//                        two adjacent bytes in 16 bits, where these fit: then
//                        it has
//     Pairs(u, s)        the sums of two
//     Join(pairs)        those of adjacent lanes added, in 32 bits

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Highway's: an instruction where the target has one, else exact all the same.
struct WideDot {
  static constexpr bool kPairs = false;

  template <class VU8, class VI8, class VI32>
  static HWY_INLINE VI32 AddQuads(VU8 u, VI8 s, VI32 sum) {
    return hwy::HWY_NAMESPACE::SumOfMulQuadAccumulate(
        hwy::HWY_NAMESPACE::DFromV<VI32>(), u, s, sum);
  }
};

// For x86 without that instruction: there is one that adds two products and
// saturates (maddubs).
struct SaturatingDot : WideDot {
  static constexpr bool kPairs = true;

  template <class VU8, class VI8>
  static HWY_INLINE auto Pairs(VU8 u, VI8 s) {
    const hwy::HWY_NAMESPACE::RepartitionToWide<
        hwy::HWY_NAMESPACE::DFromV<VI8>> d16;
    return hwy::HWY_NAMESPACE::SatWidenMulPairwiseAdd(d16, u, s);
  }
  template <class VI16>
  static HWY_INLINE auto Join(VI16 pairs) {
    const hwy::HWY_NAMESPACE::DFromV<VI16> d16;
    const hwy::HWY_NAMESPACE::RepartitionToWide<decltype(d16)> d32;
    return hwy::HWY_NAMESPACE::WidenMulPairwiseAdd(
        d32, pairs, hwy::HWY_NAMESPACE::Set(d16, 1));
  }
};

#if GKV_HAVE_BYTE_DOT && HWY_TARGET == HWY_AVX2
// The instruction in one of its encodings, which Highway does not have for the
// target.
template <ByteDot kEncoding>
struct VnniDot {
  static constexpr bool kPairs = false;

  template <class VU8, class VI8, class VI32>
  static HWY_INLINE VI32 AddQuads(VU8 u, VI8 s, VI32 sum) {
    if constexpr (kEncoding == ByteDot::kAvxVnni) {
      asm("%{vex%} vpdpbusd %2, %1, %0"
          : "+x"(sum.raw)
          : "x"(u.raw), "x"(s.raw));
    } else {
      asm("%{evex%} vpdpbusd %2, %1, %0"
          : "+x"(sum.raw)
          : "x"(u.raw), "x"(s.raw));
    }
    return sum;
  }
};
#endif

// fn(policy) with the one to be used now.
template <class Fn>
HWY_INLINE void WithCurrentDot(const Fn& fn) {
#if GKV_HAVE_BYTE_DOT && HWY_TARGET == HWY_AVX2
  [[maybe_unused]] const ByteDot current = CurrentByteDot();
#if GKV_HAVE_AVX_VNNI
  if (current == ByteDot::kAvxVnni) return fn(VnniDot<ByteDot::kAvxVnni>());
#endif
#if GKV_HAVE_AVX512_VNNI
  if (current == ByteDot::kAvx512Vnni) {
    return fn(VnniDot<ByteDot::kAvx512Vnni>());
  }
#endif
#endif
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3_DL && HWY_TARGET <= HWY_SSSE3
  fn(SaturatingDot());
#else
  fn(WideDot());
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_BYTE_DOT_INL_H_
