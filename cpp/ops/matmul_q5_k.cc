#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q5_k.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source super block of 256: d, dmin fp16, 12 bytes of 6-bit scales and minima,
// fifth bits [32] (bit b of byte l: column l of block b), nibbles [128];
// value = d * scale * q - dmin * min.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ5_K : SuperScales {
  static constexpr TensorType kType = TensorType::kQ5_K;
  static constexpr size_t kDataBytes = 5 * kVectorBytes;
  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return FiveBitQuad<kQuad>(data);
  }
};

void MatMulQ5_K(const PackedView& weights, const MatMulInput& input,
                size_t group_begin, size_t group_end, float* out,
                size_t out_stride) {
  MatMulQuantized<FormatQ5_K>(weights, input, group_begin, group_end, out,
                              out_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulQ5_K);

namespace {

constexpr size_t kDataBytes = 5 * kVectorBytes;
constexpr size_t kScaleBytes = 16 * kRowGroup;  // a super block

void Pack(const uint8_t* source, size_t rows, size_t cols, uint8_t* group) {
  uint8_t* all_scales = group + cols / kQuadBlock * kDataBytes;
  ForEachSourceBlock(
      TensorType::kQ5_K, source, rows, cols,
      [&](size_t super, size_t row, const uint8_t* bytes) {
        uint8_t* scales = all_scales + super * kScaleBytes;
        std::memcpy(scales + row * 2, bytes, 2);
        std::memcpy(scales + (kRowGroup + row) * 2, bytes + 2, 2);
        for (size_t i = 0; i < 12; ++i) {
          scales[(4 + i) * kRowGroup + row] = bytes[4 + i];
        }
        for (size_t block = 0; block < kSuperBlocks; ++block) {
          uint8_t* data = group + (super * kSuperBlocks + block) * kDataBytes;
          // Blocks 2 g and 2 g + 1 are the low and high nibbles of 32 bytes.
          const uint8_t* nibbles = bytes + 48 + block / 2 * 32;
          const size_t shift = block % 2 * 4;
          for (size_t i = 0; i < 4; ++i) {
            const uint32_t left = LoadQuad(nibbles + 4 * i) >> shift;
            const uint32_t right = LoadQuad(nibbles + 16 + 4 * i) >> shift;
            StoreQuad((left & kLowNibbles) | (right & kLowNibbles) << 4, i, row,
                      data);
          }
          uint32_t upper = 0;
          for (size_t q = 0; q < kQuads; ++q) {
            upper |= (LoadQuad(bytes + 16 + 4 * q) >> block & 0x01010101u) << q;
          }
          StoreQuad(upper, 4, row, data);
        }
      });
}

void Unpack(const uint8_t* group, size_t row, size_t cols, float* out) {
  const uint8_t* all_scales = group + cols / kQuadBlock * kDataBytes;
  for (size_t i = 0; i < cols; ++i) {
    const size_t block = i / kQuadBlock, col = i % kQuadBlock;
    const uint8_t* data = group + block * kDataBytes;
    const uint8_t* scales = all_scales + block / kSuperBlocks * kScaleBytes;
    const float d = LoadHalf(scales + row * 2);
    const float dmin = LoadHalf(scales + (kRowGroup + row) * 2);
    const ScaleMin six = KScaleMin(scales + 4 * kRowGroup + row, kRowGroup,
                                   block % kSuperBlocks);
    const uint32_t q = NibbleAt(data, row, col) | FifthBitAt(data, row, col)
                                                      << 4;
    // Each product is rounded before the difference.
    const float scaled = d * static_cast<float>(six.scale);
    const float min = dmin * static_cast<float>(six.min);
    out[i] = scaled * static_cast<float>(q) - min;
  }
}

void Dispatch(const PackedView& weights, const MatMulInput& input,
              size_t group_begin, size_t group_end, float* out,
              size_t out_stride) {
  HWY_DYNAMIC_DISPATCH(MatMulQ5_K)
  (weights, input, group_begin, group_end, out, out_stride);
}

}  // namespace

const MatMulKernel kMatMulQ5_K = {true, Pack, Unpack, Dispatch};

}  // namespace gkv

#endif  // HWY_ONCE
