#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_q6_k.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/matmul-inl.h"
#include "ops/quad_formats-inl.h"

// Source super block of 256: low nibbles [128], upper bit pairs [64], int8
// scales [16] (one per 16 columns), d fp16; value = d * scale * (q - 32).
// Packed scales, per super block: the int8 scales [16][16], d fp16 [16].

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

struct FormatQ6_K {
  static constexpr TensorType kType = TensorType::kQ6_K;
  static constexpr size_t kDataBytes = 6 * kVectorBytes;
  static constexpr size_t kParts = 2;
  static constexpr bool kHasMin = false;
  static constexpr int kZeroPoint = 32;
  static constexpr size_t kScaleBytes = 18 * kRowGroup;
  // The scales of half as many are no whole number of cache lines.
  static constexpr size_t kUnitBlocks = 2 * gkv::kUnitBlocks;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return SixBitQuad<kQuad>(data);
  }

  static void DecodeScales(const uint8_t* scales, size_t first, size_t count,
                           float* planes) {
    const hn::Rebind<int8_t, DI32> di8;
    HWY_ALIGN float d[kRowGroup];
    for (size_t part = 0; part < 2 * count; ++part) {
      const size_t at = part % (2 * kSuperBlocks);
      const uint8_t* super =
          scales + (2 * first + part) / (2 * kSuperBlocks) * kScaleBytes;
      if (at == 0) StoreHalves(super + 16 * kRowGroup, d);
      for (size_t i = 0; i < kRowGroup; i += kLanes) {
        const auto scale = hn::LoadU(
            di8, reinterpret_cast<const int8_t*>(super) + at * kRowGroup + i);
        hn::StoreU(hn::Mul(hn::LoadU(DF32(), d + i),
                           hn::ConvertTo(DF32(), hn::PromoteTo(DI32(), scale))),
                   DF32(), planes + part * kRowGroup + i);
      }
    }
  }

  static void PackScales(const uint8_t* bytes, size_t row, uint8_t* scales) {
    for (size_t i = 0; i < 16; ++i) {
      scales[i * kRowGroup + row] = bytes[192 + i];
    }
    std::memcpy(scales + 16 * kRowGroup + row * 2, bytes + 208, 2);
  }
  static void PackBlock(const uint8_t* bytes, size_t block, size_t row,
                        uint8_t* data) {
    uint32_t upper[2] = {0, 0};
    for (size_t i = 0; i < 4; ++i) {
      StoreQuad(LowQuad(bytes, block, i) | LowQuad(bytes, block, i + 4) << 4, i,
                row, data);
      upper[0] |= UpperQuad(bytes, block, i) << (2 * i);
      upper[1] |= UpperQuad(bytes, block, i + 4) << (2 * i);
    }
    StoreQuad(upper[0], 4, row, data);
    StoreQuad(upper[1], 5, row, data);
  }
  static uint32_t LevelAt(const uint8_t* data, size_t row, size_t col) {
    return NibbleAt(data, row, col) | UpperTwoAt(data, row, col) << 4;
  }
  // The scales are multiplied first, each product rounded.
  static float Value(const uint8_t* scales, size_t col, size_t row,
                     uint32_t level) {
    const int scale = static_cast<int8_t>(scales[col / 16 * kRowGroup + row]);
    const float scaled = LoadHalf(scales + 16 * kRowGroup + row * 2) *
                         static_cast<float>(scale);
    return scaled * static_cast<float>(static_cast<int>(level) - kZeroPoint);
  }

 private:
  // Adjacent columns 4 q .. 4 q + 3 of block `block` (0..7): low nibbles and
  // upper bit pairs, each in the low bits of its byte.
  static uint32_t LowQuad(const uint8_t* super, size_t block, size_t q) {
    const size_t quarter = block % 4;
    const uint8_t* low = super + block / 4 * 64 + quarter % 2 * 32;
    return LoadQuad(low + 4 * q) >> (quarter / 2 * 4) & kLowNibbles;
  }
  static uint32_t UpperQuad(const uint8_t* super, size_t block, size_t q) {
    const uint8_t* upper = super + 128 + block / 4 * 32;
    return LoadQuad(upper + 4 * q) >> (block % 4 * 2) & 0x03030303u;
  }
};

using KernelQ6_K = QuantizedKernel<FormatQ6_K>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

GKV_MATMUL_KERNEL(Q6_K);

}  // namespace gkv

#endif  // HWY_ONCE
