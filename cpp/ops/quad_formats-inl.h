// How kernels read the packed form of quad_layout.h: a quad of any width as
// unsigned bytes, and scales as f32. Included once per Highway target.

#if defined(GEMMAKV_OPS_QUAD_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_QUAD_FORMATS_INL_H_
#undef GEMMAKV_OPS_QUAD_FORMATS_INL_H_
#else
#define GEMMAKV_OPS_QUAD_FORMATS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "ops/matmul_common-inl.h"
#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

// A format, the template argument of QuantizedKernel, is a source of weights
// (matmul_block-inl.h), with kLevels, kDataBytes and Quad, and has
//   kType
//   kScaleBytes   of a source block, which is one block or a super block of 8
//   kUnitBlocks   blocks of a unit (quad_layout.h)
//   DecodeScales  scales of `count` blocks, whole source blocks, to `planes`
//                 [count][the scales, then the negated minimum][16]
//   PackScales, PackBlock  from a source block's bytes: a row's share of its
//                 scales, and of the data of its block `block`
//   LevelAt       the stored number of a row and column of a block's data
//   Value         what it stands for in column `col` of a source block
// Weights are below 64, or 8 bits wide with zero point 128.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// fp16 [16] as f32, from lane `i` on.
HWY_INLINE VF32 HalvesToFloat(const uint8_t* halves, size_t i) {
  const hn::Rebind<hwy::float16_t, DF32> df16;
  const hn::Repartition<uint8_t, decltype(df16)> du8;
  const auto bytes = hn::LoadU(du8, halves + 2 * i);
  return hn::PromoteTo(DF32(), hn::BitCast(df16, bytes));
}

// Vector `vector` of a block's data. `data` points to the column's slice.
HWY_INLINE VU8 DataVector(const uint8_t* data, size_t vector) {
  return hn::LoadU(DU8(), data + vector * kVectorBytes);
}

// The nibbles of quad kQuad.
template <size_t kQuad>
HWY_INLINE VU8 NibbleQuad(const uint8_t* data) {
  const hn::Repartition<uint16_t, DU8> du16;
  VU8 v = DataVector(data, kQuad % 4);
  if constexpr (kQuad >= 4) {
    v = hn::BitCast(DU8(), hn::ShiftRight<4>(hn::BitCast(du16, v)));
  }
  return hn::And(v, hn::Set(DU8(), 0x0F));
}

// `bits` with bit kFrom of every byte moved to bit kTo; other bits arbitrary.
template <int kFrom, int kTo>
HWY_INLINE VU8 MoveBit(VU8 bits) {
  const hn::Repartition<uint16_t, DU8> du16;
  const auto v = hn::BitCast(du16, bits);
  if constexpr (kFrom < kTo) {
    return hn::BitCast(DU8(), hn::ShiftLeft<kTo - kFrom>(v));
  } else {
    return hn::BitCast(DU8(), hn::ShiftRight<kFrom - kTo>(v));
  }
}

template <size_t kQuad>
HWY_INLINE VU8 FiveBitQuad(const uint8_t* data) {
  const VU8 upper = MoveBit<kQuad, 4>(DataVector(data, 4));
  return hn::OrAnd(NibbleQuad<kQuad>(data), upper, hn::Set(DU8(), 0x10));
}

template <size_t kQuad>
HWY_INLINE VU8 SixBitQuad(const uint8_t* data) {
  const VU8 upper = MoveBit<kQuad % 4 * 2, 4>(DataVector(data, 4 + kQuad / 4));
  return hn::OrAnd(NibbleQuad<kQuad>(data), upper, hn::Set(DU8(), 0x30));
}

// Scales of the types with one fp16 per block: [blocks][16].
template <int kBits>
struct HalfScales {
  static constexpr int kZeroPoint = 1 << (kBits - 1);
  static constexpr Levels kLevels = {kBits, kZeroPoint, 1, false};
  static constexpr size_t kScaleBytes = 2 * kRowGroup;
  static constexpr size_t kUnitBlocks = gkv::kUnitBlocks;

  static void PackScales(const uint8_t* bytes, size_t row, uint8_t* scales) {
    std::memcpy(scales + 2 * row, bytes, 2);
  }
  static float Value(const uint8_t* scales, size_t, size_t row,
                     uint32_t level) {
    const int q = static_cast<int>(level) - kZeroPoint;
    return LoadHalf(scales + 2 * row) * static_cast<float>(q);
  }
  static void DecodeScales(const uint8_t* scales, size_t count,
                           float* planes) {
    for (size_t b = 0; b < count; ++b, scales += kScaleBytes) {
      for (size_t i = 0; i < kRowGroup; i += kLanes, planes += kLanes) {
        hn::StoreU(HalvesToFloat(scales, i), DF32(), planes);
      }
    }
  }
};

// Bytes [16] as f32, from lane `i` on.
HWY_INLINE VF32 BytesToFloat(const uint8_t* bytes, size_t i) {
  const hn::Rebind<uint8_t, DI32> du8;
  return hn::ConvertTo(DF32(),
                       hn::PromoteTo(DI32(), hn::LoadU(du8, bytes + i)));
}

// Nibbles of Q4_K and Q5_K: blocks 2 g and 2 g + 1 of a super block are the low
// and the high ones of 32 bytes.
inline void PackSuperNibbles(const uint8_t* nibbles, size_t block, size_t row,
                             uint8_t* data) {
  nibbles += block / 2 * 32;
  const size_t shift = block % 2 * 4;
  for (size_t i = 0; i < 4; ++i) {
    const uint32_t left = LoadQuad(nibbles + 4 * i) >> shift & kLowNibbles;
    const uint32_t right =
        LoadQuad(nibbles + 16 + 4 * i) >> shift & kLowNibbles;
    StoreQuad(left | right << 4, i, row, data);
  }
}

// Scales of Q4_K and Q5_K, per super block: d fp16 [16], dmin fp16 [16], the 12
// scale bytes [12][16].
template <int kBits>
struct SuperScales {
  static constexpr Levels kLevels = {kBits, 0, 1, true};
  static constexpr size_t kScaleBytes = 16 * kRowGroup;
  static constexpr size_t kUnitBlocks = gkv::kUnitBlocks;

  static void PackScales(const uint8_t* bytes, size_t row, uint8_t* scales) {
    std::memcpy(scales + 2 * row, bytes, 2);
    std::memcpy(scales + 2 * (kRowGroup + row), bytes + 2, 2);
    for (size_t i = 4; i < 16; ++i) scales[i * kRowGroup + row] = bytes[i];
  }
  // Each product is rounded before the difference.
  static float Value(const uint8_t* scales, size_t col, size_t row,
                     uint32_t level) {
    const ScaleMin six = KScaleMin(scales + 4 * kRowGroup + row, kRowGroup,
                                   col / kQuadBlock);
    const float scaled =
        LoadHalf(scales + 2 * row) * static_cast<float>(six.scale);
    const float min = LoadHalf(scales + 2 * (kRowGroup + row)) *
                      static_cast<float>(six.min);
    return scaled * static_cast<float>(level) - min;
  }

  static void DecodeScales(const uint8_t* scales, size_t count,
                           float* planes) {
    for (size_t b = 0; b < count; b += kSuperBlocks, scales += kScaleBytes) {
      DecodeSuper(scales, planes + b * 2 * kRowGroup);
    }
  }

 private:
  // KScaleMin for 16 rows at once; bytes [12][16].
  static void UnpackSixBits(const uint8_t* bytes,
                            uint8_t (&scale)[kSuperBlocks][kRowGroup],
                            uint8_t (&min)[kSuperBlocks][kRowGroup]) {
    const hn::CappedTag<uint8_t, kRowGroup> d;
    const hn::Repartition<uint16_t, decltype(d)> d16;
    const auto low6 = hn::Set(d, 0x3F), low4 = hn::Set(d, 0x0F);
    const auto upper2 = hn::Set(d, 0x30);
    // Shifts cross into the neighbouring byte; the masks remove that.
    const auto right2 = [&](auto v) HWY_ATTR {
      return hn::BitCast(d, hn::ShiftRight<2>(hn::BitCast(d16, v)));
    };
    const auto right4 = [&](auto v) HWY_ATTR {
      return hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, v)));
    };
    for (size_t i = 0; i < kRowGroup; i += hn::Lanes(d)) {
      for (size_t j = 0; j < 4; ++j) {
        const auto a = hn::LoadU(d, bytes + j * kRowGroup + i);
        const auto b = hn::LoadU(d, bytes + (j + 4) * kRowGroup + i);
        const auto c = hn::LoadU(d, bytes + (j + 8) * kRowGroup + i);
        hn::StoreU(hn::And(a, low6), d, scale[j] + i);
        hn::StoreU(hn::And(b, low6), d, min[j] + i);
        hn::StoreU(hn::OrAnd(hn::And(c, low4), right2(a), upper2), d,
                   scale[j + 4] + i);
        hn::StoreU(hn::OrAnd(hn::And(right4(c), low4), right2(b), upper2), d,
                   min[j + 4] + i);
      }
    }
  }

  static void DecodeSuper(const uint8_t* super, float* HWY_RESTRICT planes) {
    HWY_ALIGN uint8_t scale[kSuperBlocks][kRowGroup];
    HWY_ALIGN uint8_t min[kSuperBlocks][kRowGroup];
    UnpackSixBits(super + 4 * kRowGroup, scale, min);
    for (size_t i = 0; i < kRowGroup; i += kLanes) {
      const VF32 d = HalvesToFloat(super, i);
      const VF32 dmin = HalvesToFloat(super + 2 * kRowGroup, i);
      float* out = planes + i;
      for (size_t j = 0; j < kSuperBlocks; ++j, out += 2 * kRowGroup) {
        hn::StoreU(hn::Mul(d, BytesToFloat(scale[j], i)), DF32(), out);
        hn::StoreU(hn::Neg(hn::Mul(dmin, BytesToFloat(min[j], i))), DF32(),
                   out + kRowGroup);
      }
    }
  }
};

// --- The formats ------------------------------------------------------------

// Source block: d fp16, nibbles [16] (low: columns 0..15, high: 16..31);
// value = d * (q - 8). Packed scales: fp16 [blocks][16].
struct FormatQ4_0 : HalfScales<4> {
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

// Source block: d fp16, fifth bits u32, nibbles [16] (low: columns 0..15, high:
// 16..31); value = d * (q - 16). Packed scales: fp16 [blocks][16].
struct FormatQ5_0 : HalfScales<5> {
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

// Source block: d fp16, int8 [32]; value = d * q.
// Packed scales: fp16 [blocks][16]. Bytes are stored as q + 128.
struct FormatQ8_0 : HalfScales<8> {
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

// Source super block of 256: d, dmin fp16, 12 bytes of 6-bit scales and minima,
// nibbles [128]; value = d * scale * q - dmin * min.
struct FormatQ4_K : SuperScales<4> {
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

// Source super block of 256: d, dmin fp16, 12 bytes of 6-bit scales and minima,
// fifth bits [32] (bit b of byte l: column l of block b), nibbles [128];
// value = d * scale * q - dmin * min.
struct FormatQ5_K : SuperScales<5> {
  static constexpr TensorType kType = TensorType::kQ5_K;
  static constexpr size_t kDataBytes = 5 * kVectorBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return FiveBitQuad<kQuad>(data);
  }

  static void PackBlock(const uint8_t* bytes, size_t block, size_t row,
                        uint8_t* data) {
    PackSuperNibbles(bytes + 48, block, row, data);
    uint32_t upper = 0;
    for (size_t q = 0; q < kQuads; ++q) {
      upper |= (LoadQuad(bytes + 16 + 4 * q) >> block & 0x01010101u) << q;
    }
    StoreQuad(upper, 4, row, data);
  }
  static constexpr auto LevelAt = FiveBitsAt;
};

// Source super block of 256: low nibbles [128], upper bit pairs [64], int8
// scales [16] (one per 16 columns), d fp16; value = d * scale * (q - 32).
// Packed scales, per super block: the int8 scales [16][16], d fp16 [16].
struct FormatQ6_K {
  static constexpr TensorType kType = TensorType::kQ6_K;
  static constexpr size_t kDataBytes = 6 * kVectorBytes;
  static constexpr int kZeroPoint = 32;
  static constexpr Levels kLevels = {6, kZeroPoint, 2, false};
  static constexpr size_t kScaleBytes = 18 * kRowGroup;
  // The scales of half as many are no whole number of cache lines.
  static constexpr size_t kUnitBlocks = 2 * gkv::kUnitBlocks;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return SixBitQuad<kQuad>(data);
  }

  static void DecodeScales(const uint8_t* scales, size_t count,
                           float* planes) {
    const hn::Rebind<int8_t, DI32> di8;
    constexpr size_t kSuperParts = 2 * kSuperBlocks;
    for (size_t b = 0; b < count; b += kSuperBlocks, scales += kScaleBytes) {
      for (size_t i = 0; i < kRowGroup; i += kLanes) {
        const VF32 d = HalvesToFloat(scales + kSuperParts * kRowGroup, i);
        const auto* at = reinterpret_cast<const int8_t*>(scales) + i;
        float* out = planes + b * 2 * kRowGroup + i;
        for (size_t part = 0; part < kSuperParts; ++part) {
          const auto scale = hn::PromoteTo(DI32(), hn::LoadU(di8, at));
          hn::StoreU(hn::Mul(d, hn::ConvertTo(DF32(), scale)), DF32(), out);
          at += kRowGroup;
          out += kRowGroup;
        }
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

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_QUAD_FORMATS_INL_H_
