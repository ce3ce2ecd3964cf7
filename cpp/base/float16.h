#ifndef GEMMAKV_BASE_FLOAT16_H_
#define GEMMAKV_BASE_FLOAT16_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "gemmakv/tensor_type.h"

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

// IEEE binary16. Rounds to nearest, ties to even, subnormals included; values
// from 65520 on become infinity. NaN stays NaN.
inline uint16_t Float16FromFloat32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude >= 0x47800000u) {  // 65536
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14: subnormal
    // Floats from 0.5 to 1 are multiples of 2^-24, as subnormals are.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f);
  } else {
    const uint32_t odd = (magnitude >> 13) & 1u;
    half = (magnitude - (112u << 23) + 0xFFFu + odd) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// Returns value `i` of those that begin at `data`. Requires: IsFloat(type).
inline float FloatAt(TensorType type, const uint8_t* data, size_t i) {
  if (type == TensorType::kF32) {
    return LoadUnaligned<float>(data + i * sizeof(float));
  }
  const auto bits = LoadUnaligned<uint16_t>(data + i * sizeof(uint16_t));
  return type == TensorType::kF16 ? Float32FromFloat16(bits)
                                  : Float32FromBFloat16(bits);
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_FLOAT16_H_
