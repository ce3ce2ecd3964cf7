#ifndef GEMMAKV_OPS_QUANTIZE_H_
#define GEMMAKV_OPS_QUANTIZE_H_

#include <cstddef>
#include <cstdint>

namespace gkv {

// Activations are quantized to 8 bits in blocks of this many values along a
// row, at absolute offsets, with no statistic across rows.
inline constexpr size_t kQuantBlock = 32;

// Rows of activations as matmul kernels for quantized weights read them.
// Pointers to the first row; rows are contiguous.
struct QuantizedRows {
  int8_t* values;  // [rows, cols], each in [-127, 127]
  float* scales;   // [rows, cols / kQuantBlock], max |x| / 127 of the block
  int32_t* sums;   // [rows, cols / kQuantBlock], sum of the block's values
};

// Quantizes `rows` rows of `cols` values; row r starts at x + r * stride.
// value = round-to-nearest-even(x * (127 / max|x|)). A block of zeros, or of
// magnitudes below 2^-118 (whose inverse could overflow), has scale 0. A block
// with a NaN or infinity gets scale NaN and zero values, so that it stays
// visible in every result.
// Requires: cols % kQuantBlock == 0.
void QuantizeRows(const float* x, size_t stride, size_t rows, size_t cols,
                  const QuantizedRows& out);

// out[i] = x[i] - (the value that `quantized` stands for), for one row. A
// second quantization takes this and adds precision. Blocks whose scale is not
// finite give NaN. `out` may equal `x`. Requires: cols % kQuantBlock == 0.
void QuantizationError(const float* x, size_t cols,
                       const QuantizedRows& quantized, float* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_QUANTIZE_H_
