// Vector types and small helpers of the matmul kernels. Included once per
// Highway target. Vectors must have a length that is a compile-time constant.

#if defined(GEMMAKV_OPS_MATMUL_COMMON_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_MATMUL_COMMON_INL_H_
#undef GEMMAKV_OPS_MATMUL_COMMON_INL_H_
#else
#define GEMMAKV_OPS_MATMUL_COMMON_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "hwy/highway.h"
#include "ops/matmul.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// The quads of four bytes that belong to the lanes of a DF32.
using DU8 = hn::Repartition<uint8_t, DF32>;
using DI8 = hn::Repartition<int8_t, DF32>;
using VU8 = hn::Vec<DU8>;

// A column is what one vector of f32 covers: a group of 16 rows or a slice of
// it. Tiles are two columns wide so that two dot products share the broadcast
// of an activation: loads, not multipliers, are the bottleneck otherwise.
inline constexpr size_t kSlices = kVectorsPer16;
static_assert(kRowGroup == 16);
inline constexpr size_t kTileColumns = 2;
inline constexpr size_t kTileGroups = kSlices == 1 ? kTileColumns : 1;
// Two accumulators (integer and float) per value fit the 32 registers of
// AVX-512. AVX2 has 16, so there the floats, which are needed once a block,
// stay in memory.
inline constexpr size_t kTileRows = kLanes == 16 ? 6 : kLanes == 8 ? 4 : 2;

// Calls fn(integral_constant i) for i in [0, kCount). Unrolled by the front
// end, so that arrays of vectors indexed by i become registers.
template <size_t kCount, class Fn>
HWY_INLINE void Unroll(const Fn& fn) {
  [&]<size_t... i>(std::index_sequence<i...>) GKV_INLINE_ATTR {
    (fn(std::integral_constant<size_t, i>()), ...);
  }
  (std::make_index_sequence<kCount>());
}

// Makes up for the rounding in the sum of the squares of a row.
inline constexpr float kNormSlack = 1 + 1e-4f;

// Makes the compiler add in the order that is written. Integer sums are the
// same in any order, and GCC chooses one that has all terms at once, which are
// more than there are registers.
template <class V>
HWY_INLINE void KeepOrder(V& sum) {
#if HWY_ARCH_X86 && !HWY_COMPILER_MSVC
  asm("" : "+x"(sum.raw));
#else
  (void)sum;
#endif
}

// Makes the compiler read again what it has read at `pointer`: all that it
// would keep from one pass over a block to the next is more than there are
// registers.
template <class T>
HWY_INLINE void ReadAgain(T*& pointer) {
#if !HWY_COMPILER_MSVC
  asm("" : "+r"(pointer));
#else
  (void)pointer;
#endif
}

// Copies acc [rows][kRowGroup] to out, `count` (1..16) values a row.
HWY_INLINE void StoreGroup(const float* HWY_RESTRICT acc, size_t rows,
                           size_t count, float* HWY_RESTRICT out,
                           size_t out_stride) {
  for (size_t m = 0; m < rows; ++m) {
    if (count == kRowGroup) {
      hwy::CopyBytes<kRowGroup * sizeof(float)>(acc + m * kRowGroup,
                                                out + m * out_stride);
    } else {
      std::memcpy(out + m * out_stride, acc + m * kRowGroup,
                  count * sizeof(float));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_COMMON_INL_H_
