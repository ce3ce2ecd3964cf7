#ifndef GEMMAKV_BASE_FLOAT16_H_
#define GEMMAKV_BASE_FLOAT16_H_

#include <bit>
#include <cstdint>

namespace gkv {

// Exact.
inline float Float32FromBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline uint16_t BFloat16FromFloat32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// IEEE binary16. Exact, subnormals included.
inline float Float32FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t rebased = exponent == 31 ? 0xFFu : exponent + 112u;
  return std::bit_cast<float>(sign | (rebased << 23) | (mantissa << 13));
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_FLOAT16_H_
