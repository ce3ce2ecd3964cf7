#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q8_0.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source block: d fp16, int8 [32]; value = d * q.
// Packed scales: fp16 [blocks][16]. Bytes are stored as q + 128.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ8_0 : HalfScales {
  static constexpr TensorType kType = TensorType::kQ8_0;
  static constexpr size_t kDataBytes = 8 * kVectorBytes;
  static constexpr int kZeroPoint = 128;
  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return DataVector(data, kQuad);
  }
};

void MatMulQ8_0(const PackedView& weights, const MatMulInput& input,
                size_t group_begin, size_t group_end, float* out,
                size_t out_stride) {
  MatMulQuantized<FormatQ8_0>(weights, input, group_begin, group_end, out,
                              out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulQ8_0);

namespace {

constexpr size_t kDataBytes = 8 * kVectorBytes;

void Pack(const uint8_t* source, size_t rows, size_t cols, uint8_t* group) {
  uint8_t* scales = group + cols / kQuadBlock * kDataBytes;
  ForEachSourceBlock(
      TensorType::kQ8_0, source, rows, cols,
      [&](size_t block, size_t row, const uint8_t* bytes) {
        std::memcpy(scales + (block * kRowGroup + row) * 2, bytes, 2);
        uint8_t* data = group + block * kDataBytes;
        for (size_t q = 0; q < kQuads; ++q) {
          const uint32_t quad = LoadQuad(bytes + 2 + 4 * q) ^ 0x80808080u;
          StoreQuad(quad, q, row, data);
        }
      });
}

void Unpack(const uint8_t* group, size_t row, size_t cols, float* out) {
  const uint8_t* scales = group + cols / kQuadBlock * kDataBytes;
  for (size_t i = 0; i < cols; ++i) {
    const size_t block = i / kQuadBlock, col = i % kQuadBlock;
    const uint8_t* data = group + block * kDataBytes;
    const float d = LoadHalf(scales + (block * kRowGroup + row) * 2);
    const int q = static_cast<int>(ByteAt(data, row, col)) - 128;
    out[i] = d * static_cast<float>(q);
  }
}

void Dispatch(const PackedView& weights, const MatMulInput& input,
              size_t group_begin, size_t group_end, float* out,
              size_t out_stride) {
  HWY_DYNAMIC_DISPATCH(MatMulQ8_0)
  (weights, input, group_begin, group_end, out, out_stride);
}

}  // namespace

const MatMulKernel kMatMulQ8_0 = {true, Pack, Unpack, Dispatch};

}  // namespace gkv

#endif  // HWY_ONCE
