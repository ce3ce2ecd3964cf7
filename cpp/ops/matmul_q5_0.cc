#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q5_0.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source block: d fp16, fifth bits u32, nibbles [16] (low: columns 0..15, high:
// 16..31); value = d * (q - 16). Packed scales: fp16 [blocks][16].

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ5_0 : HalfScales<16> {
  static constexpr TensorType kType = TensorType::kQ5_0;
  static constexpr size_t kDataBytes = 5 * kVectorBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return FiveBitQuad<kQuad>(data);
  }

  static void PackBlock(const uint8_t* bytes, size_t, size_t row,
                        uint8_t* data) {
    const uint32_t fifth = LoadQuad(bytes + 2);
    uint32_t upper = 0;
    for (size_t q = 0; q < kQuads; ++q) {
      upper |= Spread(fifth >> (4 * q) & 15u) << q;
    }
    StoreQuad(upper, 4, row, data);
    for (size_t i = 0; i < 4; ++i) {
      StoreQuad(LoadQuad(bytes + 6 + 4 * i), i, row, data);
    }
  }
  static constexpr auto LevelAt = FiveBitsAt;

 private:
  // Bit j of a nibble at bit 8 j.
  static constexpr uint32_t Spread(uint32_t nibble) {
    return (nibble & 1u) | (nibble & 2u) << 7 | (nibble & 4u) << 14 |
           (nibble & 8u) << 21;
  }
};

using KernelQ5_0 = QuantizedKernel<FormatQ5_0>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNEL(Q5_0);

}  // namespace gkv

#endif  // HWY_ONCE
