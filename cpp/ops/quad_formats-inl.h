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
#include "ops/quad_layout.h"

// A format, the template argument of QuantizedKernel, has
//   kType, kDataBytes (of a block), kZeroPoint
//   kScaleBytes   of a source block, which is one block or a super block of 8
//   kUnitBlocks   blocks of a unit (quad_layout.h)
//   kParts        scales per block: 2 for Q6_K, else 1
//   kHasMin       whether a minimum is subtracted (then kZeroPoint is 0)
//   Quad<q>(data) the unsigned weights of quad q; `data` points to the slice
//   DecodeScales  scales of blocks [first, first + count) to `planes`
//                 [count][kParts scales, then the negated minimum][16]
//   PackScales, PackBlock  from a source block's bytes: a row's share of its
//                 scales, and of the data of its block `block`
//   LevelAt       the stored number of a row and column of a block's data
//   Value         what it stands for in column `col` of a source block
// Weights are below 64, or 8 bits wide with zero point 128.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// 16 fp16 as f32.
HWY_INLINE void StoreHalves(const uint8_t* halves, float* HWY_RESTRICT out) {
  const hn::Rebind<hwy::float16_t, DF32> df16;
  const hn::Repartition<uint8_t, decltype(df16)> du8;
  for (size_t i = 0; i < kRowGroup; i += kLanes) {
    const auto bytes = hn::LoadU(du8, halves + 2 * i);
    hn::StoreU(hn::PromoteTo(DF32(), hn::BitCast(df16, bytes)), DF32(),
               out + i);
  }
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
template <int kZero>
struct HalfScales {
  static constexpr size_t kParts = 1;
  static constexpr bool kHasMin = false;
  static constexpr int kZeroPoint = kZero;
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
  static void DecodeScales(const uint8_t* scales, size_t first, size_t count,
                           float* planes) {
    for (size_t b = 0; b < count; ++b) {
      StoreHalves(scales + (first + b) * kScaleBytes, planes + b * kRowGroup);
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
struct SuperScales {
  static constexpr size_t kParts = 1;
  static constexpr bool kHasMin = true;
  static constexpr int kZeroPoint = 0;
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

  static void DecodeScales(const uint8_t* scales, size_t first, size_t count,
                           float* planes) {
    for (size_t b = 0; b < count; b += kSuperBlocks) {
      DecodeSuper(scales + (first + b) / kSuperBlocks * kScaleBytes,
                  planes + b * 2 * kRowGroup);
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
    HWY_ALIGN float d[kRowGroup], dmin[kRowGroup];
    StoreHalves(super, d);
    StoreHalves(super + 2 * kRowGroup, dmin);
    HWY_ALIGN uint8_t scale[kSuperBlocks][kRowGroup];
    HWY_ALIGN uint8_t min[kSuperBlocks][kRowGroup];
    UnpackSixBits(super + 4 * kRowGroup, scale, min);
    for (size_t j = 0; j < kSuperBlocks; ++j) {
      float* out = planes + j * 2 * kRowGroup;
      for (size_t i = 0; i < kRowGroup; i += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(DF32(), d + i), BytesToFloat(scale[j], i)),
                   DF32(), out + i);
        hn::StoreU(hn::Neg(hn::Mul(hn::LoadU(DF32(), dmin + i),
                                   BytesToFloat(min[j], i))),
                   DF32(), out + kRowGroup + i);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_QUAD_FORMATS_INL_H_
