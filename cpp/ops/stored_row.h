#ifndef GEMMAKV_OPS_STORED_ROW_H_
#define GEMMAKV_OPS_STORED_ROW_H_

#include <cstddef>
#include <cstdint>

#include "gemmakv/tensor_type.h"

namespace gkv {

// The most columns that are unpacked at a time: whole blocks of every type.
inline constexpr size_t kMaxStoredCols = 256;

// Unpacks columns of a row that lies there as files store it, to the floats
// that UnpackRow writes for the packed row. Requires: cols is in whole blocks
// and at most kMaxStoredCols.
void UnpackStored(TensorType type, const uint8_t* source, size_t cols,
                  float* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_STORED_ROW_H_
