#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q4_k.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source super block of 256: d, dmin fp16, 12 bytes of 6-bit scales and minima,
// nibbles [128]; value = d * scale * q - dmin * min.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ4_K : SuperScales {
  static constexpr TensorType kType = TensorType::kQ4_K;
  static constexpr size_t kDataBytes = 4 * kVectorBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return NibbleQuad<kQuad>(data);
  }

  static void PackBlock(const uint8_t* bytes, size_t block, size_t row,
                        uint8_t* data) {
    PackSuperNibbles(bytes + 16, block, row, data);
  }
  static constexpr auto LevelAt = NibbleAt;
};

using KernelQ4_K = QuantizedKernel<FormatQ4_K>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNEL(Q4_K);

}  // namespace gkv

#endif  // HWY_ONCE
