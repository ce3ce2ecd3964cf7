#ifndef GEMMAKV_OPS_QUAD_LAYOUT_H_
#define GEMMAKV_OPS_QUAD_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"
#include "base/bytes.h"
#include "ops/matmul.h"

// The packed form of quantized weights. Internal to ops.
//
// The columns of a row fall into blocks of 32. A quad is 4 adjacent columns, so
// a block has 8; a vector of 64 bytes holds one quad of 16 rows: byte 4 r + j
// is column 4 q + j of row r, which is what a dot product of unsigned with
// signed bytes takes when 4 activations are broadcast. Weights are stored
// unsigned, offset by their zero point. A group of 16 rows is a sequence of
// units of blocks, so reading it is one stream; the last unit may be shorter. A
// unit of 8 blocks (Q6_K: 16) is
//   scales                       as the type has them, 16 rows interleaved
//   data  [blocks][kDataBytes]   vectors of
//     8 bits: 8 vectors, one a quad
//     4 bits: 4 vectors; vector i has quad i in the low nibbles and quad i + 4
//             in the high ones
//     5 bits: these 4, and one whose byte 4 r + j has bit q for quad q
//     6 bits: these 4, and two whose bits 2 i, 2 i + 1 are for quads i and
//             i + 4
// A full unit is whole cache lines, so vectors do not straddle these.

namespace gkv {

inline constexpr size_t kQuadBlock = 32;
inline constexpr size_t kQuads = 8;
inline constexpr size_t kVectorBytes = 64;
inline constexpr size_t kUnitBlocks = 8;

// The number of blocks of 32 in one 256-column super block of the K types.
inline constexpr size_t kSuperBlocks = 8;

constexpr uint32_t kLowNibbles = 0x0F0F0F0Fu;

inline uint32_t LoadQuad(const uint8_t* bytes) {
  return LoadUnaligned<uint32_t>(bytes);
}

// Stores the 4 bytes of `row` in vector `vector` of a block's data.
inline void StoreQuad(uint32_t quad, size_t vector, size_t row, uint8_t* data) {
  std::memcpy(data + vector * kVectorBytes + row * sizeof(quad), &quad,
              sizeof(quad));
}

// These return what column `col` (0..31) of `row` has: the byte in the 8-bit
// form, the nibble, the fifth bit, this with the nibble, the two upper bits of
// six.
inline uint32_t ByteAt(const uint8_t* data, size_t row, size_t col) {
  return data[col / 4 * kVectorBytes + row * 4 + col % 4];
}
inline uint32_t NibbleAt(const uint8_t* data, size_t row, size_t col) {
  const uint32_t byte = ByteAt(data, row, col % 16);
  return col < 16 ? byte & 15u : byte >> 4;
}
inline uint32_t FifthBitAt(const uint8_t* data, size_t row, size_t col) {
  const uint8_t* bits = data + 4 * kVectorBytes;
  return (bits[row * 4 + col % 4] >> (col / 4)) & 1u;
}
inline uint32_t FiveBitsAt(const uint8_t* data, size_t row, size_t col) {
  return NibbleAt(data, row, col) | FifthBitAt(data, row, col) << 4;
}
inline uint32_t UpperTwoAt(const uint8_t* data, size_t row, size_t col) {
  const uint8_t* bits = data + (4 + col / 16) * kVectorBytes;
  return (bits[row * 4 + col % 4] >> (col % 16 / 4 * 2)) & 3u;
}

// The 6-bit scale and minimum of block `j` (0..7) of a Q4_K or Q5_K super
// block. There are 12 `bytes`, `stride` apart.
struct ScaleMin {
  uint32_t scale;
  uint32_t min;
};
inline ScaleMin KScaleMin(const uint8_t* bytes, size_t stride, size_t j) {
  const auto s = [&](size_t i) -> uint32_t { return bytes[i * stride]; };
  if (j < 4) return {s(j) & 63u, s(j + 4) & 63u};
  return {(s(j + 4) & 15u) | (s(j - 4) >> 6 << 4),
          (s(j + 4) >> 4) | (s(j) >> 6 << 4)};
}

inline float LoadHalf(const uint8_t* bytes) {
  return Float32FromFloat16(LoadUnaligned<uint16_t>(bytes));
}

}  // namespace gkv

#endif  // GEMMAKV_OPS_QUAD_LAYOUT_H_
