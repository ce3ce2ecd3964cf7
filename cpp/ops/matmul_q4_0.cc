#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q4_0.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source block: d fp16, nibbles [16] (low: columns 0..15, high: 16..31);
// value = d * (q - 8). Packed scales: fp16 [blocks][16].

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ4_0 : HalfScales<8> {
  static constexpr TensorType kType = TensorType::kQ4_0;
  static constexpr size_t kDataBytes = 4 * kVectorBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return NibbleQuad<kQuad>(data);
  }

  static void PackBlock(const uint8_t* bytes, size_t, size_t row,
                        uint8_t* data) {
    for (size_t i = 0; i < 4; ++i) {
      StoreQuad(LoadQuad(bytes + 2 + 4 * i), i, row, data);
    }
  }
  static constexpr auto LevelAt = NibbleAt;
};

using KernelQ4_0 = QuantizedKernel<FormatQ4_0>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNEL(Q4_0);

}  // namespace gkv

#endif  // HWY_ONCE
