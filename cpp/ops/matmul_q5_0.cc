#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q5_0.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source block: d fp16, fifth bits u32, nibbles [16] (low: columns 0..15, high:
// 16..31); value = d * (q - 16). Packed scales: fp16 [blocks][16].

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ5_0 : HalfScales {
  static constexpr TensorType kType = TensorType::kQ5_0;
  static constexpr size_t kDataBytes = 5 * kVectorBytes;
  static constexpr int kZeroPoint = 16;
  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return FiveBitQuad<kQuad>(data);
  }
};

void MatMulQ5_0(const PackedView& weights, const MatMulInput& input,
                size_t group_begin, size_t group_end, float* out,
                size_t out_stride) {
  MatMulQuantized<FormatQ5_0>(weights, input, group_begin, group_end, out,
                              out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulQ5_0);

namespace {

// Bit j of a nibble at bit 8 j.
constexpr uint32_t Spread(uint32_t nibble) {
  return (nibble & 1u) | (nibble & 2u) << 7 | (nibble & 4u) << 14 |
         (nibble & 8u) << 21;
}

constexpr size_t kDataBytes = 5 * kVectorBytes;

void Pack(const uint8_t* source, size_t rows, size_t cols, uint8_t* group) {
  uint8_t* scales = group + cols / kQuadBlock * kDataBytes;
  ForEachSourceBlock(TensorType::kQ5_0, source, rows, cols,
                     [&](size_t block, size_t row, const uint8_t* bytes) {
                       std::memcpy(scales + (block * kRowGroup + row) * 2,
                                   bytes, 2);
                       uint8_t* data = group + block * kDataBytes;
                       const uint32_t fifth = LoadQuad(bytes + 2);
                       uint32_t upper = 0;
                       for (size_t q = 0; q < kQuads; ++q) {
                         upper |= Spread(fifth >> (4 * q) & 15u) << q;
                       }
                       StoreQuad(upper, 4, row, data);
                       for (size_t i = 0; i < 4; ++i) {
                         StoreQuad(LoadQuad(bytes + 6 + 4 * i), i, row, data);
                       }
                     });
}

void Unpack(const uint8_t* group, size_t row, size_t cols, float* out) {
  const uint8_t* scales = group + cols / kQuadBlock * kDataBytes;
  for (size_t i = 0; i < cols; ++i) {
    const size_t block = i / kQuadBlock, col = i % kQuadBlock;
    const uint8_t* data = group + block * kDataBytes;
    const float d = LoadHalf(scales + (block * kRowGroup + row) * 2);
    const int q = static_cast<int>(NibbleAt(data, row, col) |
                                   FifthBitAt(data, row, col) << 4) -
                  16;
    out[i] = d * static_cast<float>(q);
  }
}

void Dispatch(const PackedView& weights, const MatMulInput& input,
              size_t group_begin, size_t group_end, float* out,
              size_t out_stride) {
  HWY_DYNAMIC_DISPATCH(MatMulQ5_0)
  (weights, input, group_begin, group_end, out, out_stride);
}

}  // namespace

const MatMulKernel kMatMulQ5_0 = {true, Pack, Unpack, Dispatch};

}  // namespace gkv

#endif  // HWY_ONCE
