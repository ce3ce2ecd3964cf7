#include <cstring>

#include "base/float16.h"
#include "ops/matmul_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_bf16.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul_float-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatBF16 {
  static constexpr TensorType kType = TensorType::kBF16;
  static constexpr size_t kBytes = 2;
  static HWY_INLINE VF32 Load(const uint8_t* weights) {
    const hn::Rebind<hwy::bfloat16_t, DF32> dbf16;
    const hn::Repartition<uint8_t, decltype(dbf16)> du8;
    return hn::PromoteTo(DF32(), hn::BitCast(dbf16, hn::LoadU(du8, weights)));
  }
};

void MatMulBF16(const PackedView& weights, const MatMulInput& input,
                size_t group_begin, size_t group_end, float* out,
                size_t out_stride) {
  MatMulFloat<FormatBF16>(weights, input, group_begin, group_end, out,
                          out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulBF16);

namespace {

using Element = uint16_t;

void Pack(const uint8_t* source, size_t rows, size_t cols, uint8_t* group) {
  for (size_t k = 0; k < cols; ++k) {
    for (size_t r = 0; r < kRowGroup; ++r) {
      Element value = 0;
      if (r < rows) {
        std::memcpy(&value, source + (r * cols + k) * sizeof(value),
                    sizeof(value));
      }
      std::memcpy(group + (k * kRowGroup + r) * sizeof(value), &value,
                  sizeof(value));
    }
  }
}

void Unpack(const uint8_t* group, size_t row, size_t cols, float* out) {
  for (size_t k = 0; k < cols; ++k) {
    Element value;
    std::memcpy(&value, group + (k * kRowGroup + row) * sizeof(value),
                sizeof(value));
    out[k] = Float32FromBFloat16(value);
  }
}

void Dispatch(const PackedView& weights, const MatMulInput& input,
              size_t group_begin, size_t group_end, float* out,
              size_t out_stride) {
  HWY_DYNAMIC_DISPATCH(MatMulBF16)
  (weights, input, group_begin, group_end, out, out_stride);
}

}  // namespace

const MatMulKernel kMatMulBF16 = {false, Pack, Unpack, Dispatch};

}  // namespace gkv

#endif  // HWY_ONCE
