#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q8_0.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source block: d fp16, int8 [32]; value = d * q.
// Packed scales: fp16 [blocks][16]. Bytes are stored as q + 128.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ8_0 : HalfScales<128> {
  static constexpr TensorType kType = TensorType::kQ8_0;
  static constexpr size_t kDataBytes = 8 * kVectorBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return DataVector(data, kQuad);
  }

  static void PackBlock(const uint8_t* bytes, size_t, size_t row,
                        uint8_t* data) {
    for (size_t q = 0; q < kQuads; ++q) {
      StoreQuad(LoadQuad(bytes + 2 + 4 * q) ^ 0x80808080u, q, row, data);
    }
  }
  static constexpr auto LevelAt = ByteAt;
};

using KernelQ8_0 = QuantizedKernel<FormatQ8_0>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNEL(Q8_0);

}  // namespace gkv

#endif  // HWY_ONCE
