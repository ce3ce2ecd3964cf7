#ifndef GEMMAKV_OPS_STORED_ROW_H_
#define GEMMAKV_OPS_STORED_ROW_H_

#include <cstddef>
#include <cstdint>

#include "gemmakv/tensor_type.h"

namespace gkv {

// Columns that are unpacked at a time: whole blocks of every type.
inline constexpr size_t kMaxStoredCols = 256;

// Columns of a row as files store it, at most kMaxStoredCols, as floats: the
// values that UnpackRow gives of the packed row. Requires: whole blocks.
void UnpackStored(TensorType type, const uint8_t* source, size_t cols,
                  float* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_STORED_ROW_H_
