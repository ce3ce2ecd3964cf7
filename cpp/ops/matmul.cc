#include "ops/matmul.h"

#include <iterator>

#include "ops/matmul_kernel.h"

namespace gkv {
namespace {

struct Entry {
  TensorType type;
  const MatMulKernel& kernel;
};

constexpr Entry kKernels[] = {
    {TensorType::kF32, kMatMulF32},   {TensorType::kF16, kMatMulF16},
    {TensorType::kBF16, kMatMulBF16}, {TensorType::kQ4_0, kMatMulQ4_0},
    {TensorType::kQ5_0, kMatMulQ5_0}, {TensorType::kQ8_0, kMatMulQ8_0},
    {TensorType::kQ4_K, kMatMulQ4_K}, {TensorType::kQ5_K, kMatMulQ5_K},
    {TensorType::kQ6_K, kMatMulQ6_K},
};
static_assert(std::size(kKernels) == std::size(kTensorTypes));

const MatMulKernel& KernelOf(TensorType type) {
  for (const Entry& entry : kKernels) {
    if (entry.type == type) return entry.kernel;
  }
  return kMatMulF32;  // unreachable: every enumerator has its row
}

}  // namespace

bool UsesQuantizedActivations(TensorType type) {
  return KernelOf(type).levels.bits != 0;
}

void PackGroup(TensorType type, const uint8_t* source, size_t rows, size_t cols,
               uint8_t* group) {
  KernelOf(type).pack_group(source, rows, cols, group);
}

void UnpackRow(const PackedView& weights, size_t row, float* out) {
  const uint8_t* group =
      weights.data + row / kRowGroup * GroupBytes(weights.type, weights.cols);
  KernelOf(weights.type).unpack_row(group, row % kRowGroup, weights.cols, out);
}

void SquaredNorms(const PackedView& weights, size_t group, float* out) {
  KernelOf(weights.type)
      .squared_norms(
          weights.data + group * GroupBytes(weights.type, weights.cols),
          weights.cols, out);
}

RowLayout LayoutOfRows(TensorType type, size_t rows, size_t cols) {
  if (!UsesQuantizedActivations(type)) return {0, 0};
  return LayoutOfPanelRows(KernelOf(type).levels, rows, cols);
}

void LayOutRows(TensorType type, const MatMulInput& input, size_t cols,
                size_t tile, uint8_t* out) {
  LayOutPanelRows(KernelOf(type).levels, input, cols, tile, out);
}

void MatMul(const PackedView& weights, const MatMulInput& input,
            size_t group_begin, size_t group_end, uint8_t* scratch, float* out,
            size_t out_stride) {
  const MatMulKernel& kernel = KernelOf(weights.type);
  const MatMulTask task = {weights,   input, group_begin, group_end,
                           scratch, out,   out_stride};
  if (LayoutOfRows(weights.type, input.rows, weights.cols).tiles != 0) {
    MatMulPanels(kernel, task);
  } else {
    kernel.matmul(task);
  }
}

}  // namespace gkv
