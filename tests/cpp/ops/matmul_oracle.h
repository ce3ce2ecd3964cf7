#ifndef GEMMAKV_TESTS_OPS_MATMUL_ORACLE_H_
#define GEMMAKV_TESTS_OPS_MATMUL_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/float16.h"
#include "gemmakv/tensor_type.h"

// The value of one weight straight from the bytes of a file, element by element
// as the GGUF specification describes each type. Slow and obvious.

namespace gkv {

inline float HalfAt(const uint8_t* bytes) {
  return Float32FromFloat16(static_cast<uint16_t>(bytes[0] | bytes[1] << 8));
}

// Value `i` (0..31) of blocks with one fp16 scale.
inline float SmallBlockValue(TensorType type, const uint8_t* block, size_t i) {
  const float d = HalfAt(block);
  if (type == TensorType::kQ8_0) {
    return d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
  const bool five = type == TensorType::kQ5_0;
  const uint8_t* nibbles = block + (five ? 6 : 2);
  int q = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
  if (five) q += (block[2 + i / 8] >> (i % 8) & 1) * 16;
  return d * static_cast<float>(q - (five ? 16 : 8));
}

// Value `i` (0..255) of a Q4_K or Q5_K super block.
inline float MinBlockValue(TensorType type, const uint8_t* block, size_t i) {
  const uint8_t* s = block + 4;
  const size_t j = i / 32;
  const int scale =
      j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
  const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  const bool five = type == TensorType::kQ5_K;
  const uint8_t* nibbles = block + (five ? 48 : 16) + i / 64 * 32;
  int q = i / 32 % 2 == 0 ? nibbles[i % 32] & 15 : nibbles[i % 32] >> 4;
  if (five) q += (block[16 + i % 32] >> j & 1) * 16;
  const float scaled = HalfAt(block) * static_cast<float>(scale);
  const float scaled_min = HalfAt(block + 2) * static_cast<float>(min);
  return scaled * static_cast<float>(q) - scaled_min;
}

// Value `i` (0..255) of a Q6_K super block.
inline float Q6KValue(const uint8_t* block, size_t i) {
  const size_t half = i / 128, in_half = i % 128, l = i % 32;
  const uint8_t* low = block + half * 64;
  const uint8_t* high = block + 128 + half * 32;
  int q = 0;
  switch (in_half / 32) {
    case 0:
      q = (low[l] & 15) | (high[l] & 3) << 4;
      break;
    case 1:
      q = (low[l + 32] & 15) | (high[l] >> 2 & 3) << 4;
      break;
    case 2:
      q = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
      break;
    default:
      q = low[l + 32] >> 4 | (high[l] >> 6) << 4;
      break;
  }
  const int scale = static_cast<int8_t>(block[192 + i / 16]);
  const float scaled = HalfAt(block + 208) * static_cast<float>(scale);
  return scaled * static_cast<float>(q - 32);
}

// Weight `col` of the row that starts at `row`.
inline float WeightAt(TensorType type, const uint8_t* row, size_t col) {
  const TensorTypeInfo& info = Info(type);
  const uint8_t* block = row + col / info.values * info.bytes;
  const size_t i = col % info.values;
  switch (type) {
    case TensorType::kF32: {
      float value;
      std::memcpy(&value, block, sizeof(value));
      return value;
    }
    case TensorType::kF16:
      return HalfAt(block);
    case TensorType::kBF16:
      return Float32FromBFloat16(
          static_cast<uint16_t>(block[0] | block[1] << 8));
    case TensorType::kQ4_K:
    case TensorType::kQ5_K:
      return MinBlockValue(type, block, i);
    case TensorType::kQ6_K:
      return Q6KValue(block, i);
    default:
      return SmallBlockValue(type, block, i);
  }
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_OPS_MATMUL_ORACLE_H_
