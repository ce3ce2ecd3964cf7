#ifndef GEMMAKV_MODEL_ACTIVATIONS_H_
#define GEMMAKV_MODEL_ACTIVATIONS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/aligned_buffer.h"
#include "ops/matmul.h"
#include "ops/quantize.h"

namespace gkv {

// The number of planes for 16-bit precision, see below.
inline constexpr size_t kFinePlanes = 2;

// Input rows of matrix products, in float and in 8-bit blocks. With two planes,
// what the first quantization lost is quantized again and multiplied as if it
// were further rows (row r of the second plane follows all rows of the first):
// a product is then the sum of two rows of output. That is 16-bit precision
// where it matters, at no cost while a step is bound by reading weights.
struct Activations {
  size_t cols = 0;
  size_t rows = 0;
  size_t planes = 1;
  AlignedBuffer<float> floats;   // [rows, cols]
  AlignedBuffer<int8_t> values;  // [planes, rows, cols]
  AlignedBuffer<float> scales;   // [planes, rows, cols / kQuantBlock]
  AlignedBuffer<int32_t> sums;   // [planes, rows, cols / kQuantBlock]
  // Room for the tiles that LayOutRows makes of the rows, for each type of a
  // product's matrices, of which no more than three differ.
  AlignedBuffer<uint8_t> laid_out[3];

  void Resize(size_t new_rows, size_t new_cols, size_t new_planes = 1) {
    rows = new_rows;
    cols = new_cols;
    planes = new_planes;
    floats.EnsureSize(rows * cols);
    values.EnsureSize(planes * rows * cols);
    scales.EnsureSize(planes * rows * (cols / kQuantBlock));
    sums.EnsureSize(planes * rows * (cols / kQuantBlock));
  }
  float* row(size_t r) { return floats.data() + r * cols; }
  // The quantized row from column `begin` on, which is the start of a block.
  QuantizedRows quantized(size_t r, size_t begin = 0) {
    const size_t block = (r * cols + begin) / kQuantBlock;
    return {values.data() + r * cols + begin, scales.data() + block,
            sums.data() + block};
  }
  // Quantizes a row whose floats are final. Rows of a width that is no multiple
  // of the block feed float weights only: no quantized type can have such
  // columns.
  void Quantize(size_t r) {
    if (cols % kQuantBlock != 0) return;
    QuantizeRows(row(r), cols, 1, cols, quantized(r));
    if (planes == 1) return;
    // The errors are taken in stretches that stay in cache.
    constexpr size_t kErrorStripe = 16 * kQuantBlock;
    float errors[kErrorStripe];
    for (size_t begin = 0; begin < cols; begin += kErrorStripe) {
      const size_t count = std::min(kErrorStripe, cols - begin);
      QuantizationError(row(r) + begin, count, quantized(r, begin), errors);
      QuantizeRows(errors, count, 1, count, quantized(rows + r, begin));
    }
  }
  // Quantizes `stretch` as columns [begin, end) of a row, for products that
  // read 8-bit blocks alone: the row's own floats stay as they are. Requires:
  // one plane; begin is the start of a block, end that of another or the end of
  // the row.
  void QuantizeStretch(size_t r, size_t begin, size_t end,
                       const float* stretch) {
    if (cols % kQuantBlock != 0) return;
    QuantizeRows(stretch, cols, 1, end - begin, quantized(r, begin));
  }
  // Copies a row of other activations of this width to row `r`: its floats or,
  // if `quantized`, its 8-bit blocks. Rows of a second plane follow those of
  // the first one.
  void CopyRow(size_t r, Activations& from, size_t row, bool quantized) {
    if (!quantized) {
      std::copy_n(from.row(row), cols, this->row(r));
      return;
    }
    const size_t blocks = cols / kQuantBlock;
    std::copy_n(from.values.data() + row * cols, cols,
                values.data() + r * cols);
    std::copy_n(from.scales.data() + row * blocks, blocks,
                scales.data() + r * blocks);
    std::copy_n(from.sums.data() + row * blocks, blocks,
                sums.data() + r * blocks);
  }
  // Returns the number of output rows of a product with weights of this type.
  size_t OutputRows(TensorType type) const {
    return UsesQuantizedActivations(type) ? planes * rows : rows;
  }
  MatMulInput input(TensorType type) {
    return {floats.data(), cols, quantized(0), OutputRows(type)};
  }
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_ACTIVATIONS_H_
