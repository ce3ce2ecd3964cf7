#include "ops/stored_row.h"

#include "ops/matmul.h"

namespace gkv {

void UnpackStored(TensorType type, const uint8_t* source, size_t cols,
                  float* out) {
  alignas(64) uint8_t group[GroupBytes(TensorType::kF32, kMaxStoredCols)];
  PackGroup(type, source, 1, cols, group);
  UnpackRow({type, 1, cols, group}, 0, out);
}

}  // namespace gkv
