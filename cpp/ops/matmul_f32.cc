#include <cstring>

#include "ops/matmul_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_f32.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul_float-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatF32 {
  static constexpr TensorType kType = TensorType::kF32;
  static constexpr size_t kBytes = 4;
  static HWY_INLINE VF32 Load(const uint8_t* weights) {
    return hn::LoadU(DF32(), reinterpret_cast<const float*>(weights));
  }
};

void MatMulF32(const PackedView& weights, const MatMulInput& input,
               size_t group_begin, size_t group_end, float* out,
               size_t out_stride) {
  MatMulFloat<FormatF32>(weights, input, group_begin, group_end, out,
                         out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulF32);

namespace {

using Element = float;

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
    out[k] = value;
  }
}

void Dispatch(const PackedView& weights, const MatMulInput& input,
              size_t group_begin, size_t group_end, float* out,
              size_t out_stride) {
  HWY_DYNAMIC_DISPATCH(MatMulF32)
  (weights, input, group_begin, group_end, out, out_stride);
}

}  // namespace

const MatMulKernel kMatMulF32 = {false, Pack, Unpack, Dispatch};

}  // namespace gkv

#endif  // HWY_ONCE
