#include "ops/quantize_weights.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/float16.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize_weights.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

using DU16 = hn::Rebind<uint16_t, DF32>;
using DU8 = hn::Rebind<uint8_t, DF32>;

constexpr size_t kBlock = 32;
constexpr int32_t kInfinityBits = 0x7F800000;

// Values as floats, and their magnitudes as bit patterns: these compare like
// the magnitudes, with kInfinityBits or more for infinity and NaN.
struct Loaded {
  VF32 values;
  VI32 magnitudes;
};

VI32 MagnitudeBits(VF32 values) { return hn::BitCast(DI32(), hn::Abs(values)); }

struct FromF32 {
  static constexpr size_t kBytes = 4;
  static HWY_INLINE Loaded Load(const uint8_t* source) {
    const hn::Repartition<uint8_t, DF32> bytes;
    const VF32 values = hn::BitCast(DF32(), hn::LoadU(bytes, source));
    return {values, MagnitudeBits(values)};
  }
};

struct FromBF16 {
  static constexpr size_t kBytes = 2;
  static HWY_INLINE Loaded Load(const uint8_t* source) {
    const hn::Repartition<uint8_t, DU16> bytes;
    const auto halves = hn::BitCast(DU16(), hn::LoadU(bytes, source));
    const VF32 values =
        hn::BitCast(DF32(), hn::ShiftLeft<16>(hn::PromoteTo(DU32(), halves)));
    return {values, MagnitudeBits(values)};
  }
};

struct FromF16 {
  static constexpr size_t kBytes = 2;
  static HWY_INLINE Loaded Load(const uint8_t* source) {
    const hn::Repartition<uint8_t, DU16> bytes;
    const hn::Rebind<hwy::float16_t, DF32> df16;
    const auto raw = hn::LoadU(bytes, source);
    const VF32 values = hn::PromoteTo(DF32(), hn::BitCast(df16, raw));
    // Where the conversion is emulated, infinity and NaN become numbers.
    const VI32 exponent =
        hn::And(hn::PromoteTo(DI32(), hn::BitCast(DU16(), raw)),
                hn::Set(DI32(), 0x7C00));
    const auto special = hn::Eq(exponent, hn::Set(DI32(), 0x7C00));
    return {values, hn::IfThenElse(special, hn::Set(DI32(), kInfinityBits),
                                   MagnitudeBits(values))};
  }
};

// A block as floats.
struct Block {
  HWY_ALIGN float values[kBlock];
  int32_t max_bits;  // of the largest magnitude
};

template <class From>
void LoadBlock(const uint8_t* HWY_RESTRICT source, Block& block) {
  VI32 max = hn::Zero(DI32());
  for (size_t i = 0; i < kBlock; i += kLanes) {
    const Loaded loaded = From::Load(source + i * From::kBytes);
    hn::Store(loaded.values, DF32(), block.values + i);
    max = hn::Max(max, loaded.magnitudes);
  }
  block.max_bits = hn::ReduceMax(DI32(), max);
}

float InverseOf(float d) {
  const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// Stores d as binary16. Returns false if it is infinite there.
bool StoreScale(float d, uint8_t* out) {
  const uint16_t half = Float16FromFloat32(d);
  std::memcpy(out, &half, sizeof(half));
  return (half & 0x7FFF) != 0x7C00;
}

struct ToQ8_0 {
  static constexpr size_t kBytes = 34;

  static HWY_INLINE bool Store(const Block& block, uint8_t* HWY_RESTRICT out) {
    const hn::Rebind<int8_t, DF32> di8;
    const float d = std::bit_cast<float>(block.max_bits) / 127.0f;
    const VF32 inverse = hn::Set(DF32(), InverseOf(d));
    const VF32 half = hn::Set(DF32(), 0.5f);
    for (size_t i = 0; i < kBlock; i += kLanes) {
      const VF32 scaled = hn::Mul(hn::Load(DF32(), block.values + i), inverse);
      const VF32 size = hn::Abs(scaled);
      const VI32 whole = hn::ConvertTo(DI32(), size);
      // Exact; adding 0.5 instead would round.
      const VF32 rest = hn::Sub(size, hn::ConvertTo(DF32(), whole));
      const VI32 up = hn::IfThenElseZero(
          hn::RebindMask(DI32(), hn::Ge(rest, half)), hn::Set(DI32(), 1));
      const VI32 rounded = hn::Add(whole, up);
      const VI32 signs = hn::BroadcastSignBit(hn::BitCast(DI32(), scaled));
      const VI32 q = hn::Sub(hn::Xor(rounded, signs), signs);
      hn::StoreU(hn::DemoteTo(di8, q), di8,
                 reinterpret_cast<int8_t*>(out + 2 + i));
    }
    return StoreScale(d, out);
  }
};

// Returns the first value of the largest magnitude.
float LargestValue(const Block& block) {
  const int32_t negative_bits =
      block.max_bits | std::numeric_limits<int32_t>::min();
  const VI32 positive = hn::Set(DI32(), block.max_bits);
  const VI32 negative = hn::Set(DI32(), negative_bits);
  VI32 is_positive = hn::Zero(DI32()), is_negative = hn::Zero(DI32());
  for (size_t i = 0; i < kBlock; i += kLanes) {
    const VI32 bits = hn::BitCast(DI32(), hn::Load(DF32(), block.values + i));
    is_positive =
        hn::Or(is_positive, hn::VecFromMask(DI32(), hn::Eq(bits, positive)));
    is_negative =
        hn::Or(is_negative, hn::VecFromMask(DI32(), hn::Eq(bits, negative)));
  }
  const float magnitude = std::bit_cast<float>(block.max_bits);
  if (hn::AllFalse(DI32(), hn::MaskFromVec(is_negative))) return magnitude;
  if (hn::AllFalse(DI32(), hn::MaskFromVec(is_positive))) return -magnitude;
  size_t i = 0;
  while (std::abs(block.values[i]) != magnitude) ++i;
  return block.values[i];
}

// Writes the levels of a block around their middle, q [kBlock]. Returns d.
template <int kLevels>
HWY_INLINE float Levels(const Block& block, uint8_t* HWY_RESTRICT q) {
  constexpr float kMiddle = kLevels / 2;
  const float d = LargestValue(block) / -kMiddle;
  const VF32 inverse = hn::Set(DF32(), InverseOf(d));
  const VF32 shift = hn::Set(DF32(), kMiddle + 0.5f);
  const VI32 top = hn::Set(DI32(), kLevels - 1);
  for (size_t i = 0; i < kBlock; i += kLanes) {
    // Never negative, so that the conversion is floor.
    const VF32 scaled =
        hn::Add(hn::Mul(hn::Load(DF32(), block.values + i), inverse), shift);
    const VI32 level = hn::Min(hn::ConvertTo(DI32(), scaled), top);
    hn::Store(hn::DemoteTo(DU8(), level), DU8(), q + i);
  }
  return d;
}

using DBytes = hn::FixedTag<uint8_t, 16>;

// Stores the low four bits of q [kBlock]: those of value j in the low half of
// byte j, those of value j + 16 in its high half.
HWY_INLINE void StoreNibbles(const uint8_t* HWY_RESTRICT q,
                             uint8_t* HWY_RESTRICT out) {
  const auto mask = hn::Set(DBytes(), 15);
  const auto low = hn::And(hn::Load(DBytes(), q), mask);
  const auto high = hn::And(hn::Load(DBytes(), q + 16), mask);
  hn::StoreU(hn::Or(low, hn::ShiftLeft<4>(high)), DBytes(), out);
}

struct ToQ4_0 {
  static constexpr size_t kBytes = 18;

  static HWY_INLINE bool Store(const Block& block, uint8_t* HWY_RESTRICT out) {
    HWY_ALIGN uint8_t q[kBlock];
    const float d = Levels<16>(block, q);
    StoreNibbles(q, out + 2);
    return StoreScale(d, out);
  }
};

struct ToQ5_0 {
  static constexpr size_t kBytes = 22;

  static HWY_INLINE bool Store(const Block& block, uint8_t* HWY_RESTRICT out) {
    HWY_ALIGN uint8_t q[kBlock];
    const float d = Levels<32>(block, q);
    const auto fifth = hn::Set(DBytes(), 16);
    for (size_t half = 0; half < 2; ++half) {
      uint8_t bits[8];  // what StoreMaskBits may write
      hn::StoreMaskBits(DBytes(),
                        hn::Ge(hn::Load(DBytes(), q + 16 * half), fifth), bits);
      std::memcpy(out + 2 + 2 * half, bits, 2);
    }
    StoreNibbles(q, out + 6);
    return StoreScale(d, out);
  }
};

template <class From, class To>
bool QuantizeBlocks(const uint8_t* source, size_t count, uint8_t* out) {
  Block block;
  for (size_t i = 0; i < count; i += kBlock, out += To::kBytes) {
    LoadBlock<From>(source + i * From::kBytes, block);
    if (block.max_bits >= kInfinityBits || !To::Store(block, out)) return false;
  }
  return true;
}

// The least magnitude that rounds to infinity.
constexpr int32_t kTooLargeForBF16 = 0x7F7F8000;

// Converts the values of one vector and returns their magnitudes.
template <class From>
HWY_INLINE VI32 ConvertToBF16(const uint8_t* HWY_RESTRICT source,
                              uint8_t* HWY_RESTRICT out) {
  const DU32 du32;
  const Loaded loaded = From::Load(source);
  const auto bits = hn::BitCast(du32, loaded.values);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
  const auto rounded = hn::Add(bits, hn::Add(hn::Set(du32, 0x7FFF), odd));
  const auto halves = hn::TruncateTo(DU16(), hn::ShiftRight<16>(rounded));
  const hn::Repartition<uint8_t, DU16> bytes;
  hn::StoreU(hn::BitCast(bytes, halves), bytes, out);
  return loaded.magnitudes;
}

template <class From>
bool ToBF16(const uint8_t* source, size_t count, uint8_t* out) {
  VI32 max = hn::Zero(DI32());
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    max = hn::Max(max,
                  ConvertToBF16<From>(source + i * From::kBytes, out + 2 * i));
  }
  if (i < count) {
    uint8_t padded[64] = {}, converted[32];
    std::memcpy(padded, source + i * From::kBytes, (count - i) * From::kBytes);
    max = hn::Max(max, ConvertToBF16<From>(padded, converted));
    std::memcpy(out + 2 * i, converted, (count - i) * 2);
  }
  return hn::ReduceMax(DI32(), max) < kTooLargeForBF16;
}

template <class From>
bool Quantize(const uint8_t* source, size_t count, TensorType to,
              uint8_t* out) {
  switch (to) {
    case TensorType::kQ8_0:
      return QuantizeBlocks<From, ToQ8_0>(source, count, out);
    case TensorType::kQ5_0:
      return QuantizeBlocks<From, ToQ5_0>(source, count, out);
    case TensorType::kQ4_0:
      return QuantizeBlocks<From, ToQ4_0>(source, count, out);
    default:
      return ToBF16<From>(source, count, out);
  }
}

bool QuantizeWeightsImpl(TensorType from, const uint8_t* source, size_t count,
                         TensorType to, uint8_t* out) {
  switch (from) {
    case TensorType::kF16:
      return Quantize<FromF16>(source, count, to, out);
    case TensorType::kBF16:
      return Quantize<FromBF16>(source, count, to, out);
    default:
      return Quantize<FromF32>(source, count, to, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(QuantizeWeightsImpl);

bool QuantizeWeights(TensorType from, const uint8_t* source, size_t count,
                     TensorType to, uint8_t* out) {
  return HWY_DYNAMIC_DISPATCH(QuantizeWeightsImpl)(from, source, count, to,
                                                   out);
}

}  // namespace gkv

#endif  // HWY_ONCE
