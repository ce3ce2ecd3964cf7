#ifndef GEMMAKV_OPS_MATMUL_H_
#define GEMMAKV_OPS_MATMUL_H_

#include <cstddef>
#include <cstdint>

#include "base/rounding.h"
#include "gemmakv/tensor_type.h"
#include "ops/quantize.h"

// Products of activation rows with packed weights.
//
// PackGroup() interleaves the weights of 16 output rows to a group, in the same
// way on every target. A SIMD lane owns an output row and walks the columns in
// order, so an output value has the same bits whatever the number of activation
// rows, the split of groups over threads, and the width of the vectors. A task
// is a range of groups: MatMul() multiplies these with all activation rows, and
// writes only what belongs to them. Kernels of quantized weights read
// activations in 8 bits (QuantizedRows), the others floats. With many rows they
// read tiles of laid out activations, which LayOutRows() makes once for all
// tasks; without them each call of MatMul() makes its own.

namespace gkv {

inline constexpr size_t kRowGroup = 16;

// The version of the packed form of all weight types together. Files of packed
// weights carry it. Whoever changes what PackGroup writes raises it.
inline constexpr uint32_t kPackedLayoutVersion = 2;

constexpr size_t NumGroups(size_t rows) {
  return CeilDiv(rows, kRowGroup);
}

// Returns the bytes of one packed group: 16 rows in the file's own bits per
// weight.
constexpr size_t GroupBytes(TensorType type, size_t cols) {
  return kRowGroup * RowBytes(type, cols);
}

// A packed matrix of `rows` x `cols` weights: NumGroups(rows) groups, one after
// the other. Rows of the last group past the end are zeros. Not owning.
struct PackedView {
  TensorType type;
  size_t rows;
  size_t cols;
  const uint8_t* data;  // aligned to 64 bytes for whole tensors
};

// Whether kernels of this weight type read QuantizedRows (8-bit activations)
// rather than float rows.
bool UsesQuantizedActivations(TensorType type);

// Packs one group from `rows` (1..16) consecutive source rows.
void PackGroup(TensorType type, const uint8_t* source, size_t rows, size_t cols,
               uint8_t* group);

// Writes row `row` as floats, out [cols]. Exact.
void UnpackRow(const PackedView& weights, size_t row, float* out);

// Writes the sum of the squares of each row of group `group`, out [16]: never
// less than it is, and at most 2e-4 of it more. It is 0 for absent rows.
void SquaredNorms(const PackedView& weights, size_t group, float* out);

// Activation rows. `quantized` is read if UsesQuantizedActivations(type), else
// `floats` is.
struct MatMulInput {
  const float* floats;  // [rows, stride]
  size_t stride;
  QuantizedRows quantized;
  size_t rows;
  // All tiles, as LayOutRows has written them; null: each call makes its own.
  const uint8_t* laid_out = nullptr;
};

// The form in which the kernels of a type read many rows: tiles of some rows,
// with all that depends on the type computed before. Kernels of floats, and
// those of few rows, read the input as it is: then there are no tiles.
struct RowLayout {
  size_t tiles;
  size_t bytes;  // of all tiles
};
// Returns the layout for products of `rows` rows with `cols` columns on the
// current target.
RowLayout LayoutOfRows(TensorType type, size_t rows, size_t cols);

// Writes tile `tile` to its place in `out` [RowLayout::bytes], which is aligned
// to 64 bytes. Thread-safe for different tiles.
void LayOutRows(TensorType type, const MatMulInput& input, size_t cols,
                size_t tile, uint8_t* out);

// The size of MatMul's scratch, whatever its arguments are.
inline constexpr size_t kMatMulScratchBytes = 308 * 1024;

// out[m * out_stride + r] = dot(weights row r, input row m) for the rows r of
// groups [group_begin, group_end). Never writes past column weights.rows - 1.
// `scratch` [kMatMulScratchBytes] is aligned to 64 bytes; its content does not
// matter. Thread-safe for disjoint groups with a scratch of their own each.
void MatMul(const PackedView& weights, const MatMulInput& input,
            size_t group_begin, size_t group_end, uint8_t* scratch, float* out,
            size_t out_stride);

}  // namespace gkv

#endif  // GEMMAKV_OPS_MATMUL_H_
