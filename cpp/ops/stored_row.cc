#include "ops/stored_row.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/matmul.h"

namespace gkv {
namespace {

// The number of columns that are packed at a time, in whole blocks of `type`.
// It is small, since a group has 16 times the bytes of its only row.
constexpr size_t PieceCols(TensorType type) {
  return std::max<size_t>(32, Info(type).values);
}

constexpr size_t MostGroupBytes() {
  size_t most = 0;
  for (const TensorTypeInfo& info : kTensorTypes) {
    most = std::max(most, GroupBytes(info.type, PieceCols(info.type)));
  }
  return most;
}

}  // namespace

void UnpackStored(TensorType type, const uint8_t* source, size_t cols,
                  float* out) {
  alignas(64) uint8_t group[MostGroupBytes()];
  const size_t most = PieceCols(type);
  for (size_t begin = 0; begin < cols; begin += most) {
    const size_t count = std::min(most, cols - begin);
    PackGroup(type, source + RowBytes(type, begin), 1, count, group);
    UnpackRow({type, 1, count, group}, 0, out + begin);
  }
}

}  // namespace gkv
