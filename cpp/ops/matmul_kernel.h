#ifndef GEMMAKV_OPS_MATMUL_KERNEL_H_
#define GEMMAKV_OPS_MATMUL_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "ops/matmul.h"

// What a weight type provides. Internal to ops.

namespace gkv {

// The arguments of MatMul().
struct MatMulTask {
  const PackedView& weights;
  const MatMulInput& input;
  size_t group_begin, group_end;
  uint8_t* scratch;
  float* out;
  size_t out_stride;
};

struct MatMulKernel {
  bool quantized_activations;
  void (*pack_group)(const uint8_t* source, size_t rows, size_t cols,
                     uint8_t* group);
  // Row `row` (0..15) of a group.
  void (*unpack_row)(const uint8_t* group, size_t row, size_t cols, float* out);
  // Of the 16 rows of a group, as SquaredNorms() has it.
  void (*squared_norms)(const uint8_t* group, size_t cols, float* out);
  void (*matmul)(const MatMulTask& task);
  // With quantized activations; else null.
  RowLayout (*layout_of_rows)(size_t rows, size_t cols);
  void (*lay_out_rows)(const MatMulInput& input, size_t cols, size_t tile,
                       uint8_t* out);
};

extern const MatMulKernel kMatMulF32;
extern const MatMulKernel kMatMulF16;
extern const MatMulKernel kMatMulBF16;
extern const MatMulKernel kMatMulQ4_0;
extern const MatMulKernel kMatMulQ5_0;
extern const MatMulKernel kMatMulQ8_0;
extern const MatMulKernel kMatMulQ4_K;
extern const MatMulKernel kMatMulQ5_K;
extern const MatMulKernel kMatMulQ6_K;

// Behind the last target, in namespace gkv: defines kMatMul<Name> by what the
// class Kernel<Name> of every target has. Packing is no work for SIMD: that of
// one target serves all. The first is for kernels that read floats, the second
// for those that read quantized activations.
#define GKV_FLOAT_MATMUL_KERNEL(Name) \
  GKV_EXPORT_MATMUL(Name);            \
  const MatMulKernel kMatMul##Name = {GKV_MATMUL_OF(Name), nullptr, nullptr}

#define GKV_MATMUL_KERNEL(Name)                                         \
  GKV_EXPORT_MATMUL(Name);                                              \
  HWY_EXPORT_T(LayoutOfRows##Name, Kernel##Name::LayoutOfRows);         \
  HWY_EXPORT_T(LayOutRows##Name, Kernel##Name::LayOutRows);             \
  const MatMulKernel kMatMul##Name = {                                  \
      GKV_MATMUL_OF(Name),                                              \
      [](size_t rows, size_t cols) {                                    \
        return HWY_DYNAMIC_DISPATCH_T(LayoutOfRows##Name)(rows, cols);  \
      },                                                                \
      [](const MatMulInput& input, size_t cols, size_t tile,            \
         uint8_t* out) {                                                \
        HWY_DYNAMIC_DISPATCH_T(LayOutRows##Name)(input, cols, tile, out); \
      }}

// What both have.
#define GKV_EXPORT_MATMUL(Name)                       \
  HWY_EXPORT_T(MatMul##Name, Kernel##Name::MatMul);   \
  HWY_EXPORT_T(SquaredNorms##Name, Kernel##Name::SquaredNorms)
#define GKV_MATMUL_OF(Name)                                             \
  HWY_NAMESPACE::Kernel##Name::kQuantizedActivations,                   \
      HWY_NAMESPACE::Kernel##Name::PackGroup,                           \
      HWY_NAMESPACE::Kernel##Name::UnpackRow,                           \
      [](const uint8_t* group, size_t cols, float* out) {               \
        HWY_DYNAMIC_DISPATCH_T(SquaredNorms##Name)(group, cols, out);   \
      },                                                                \
      [](const MatMulTask& task) {                                      \
        HWY_DYNAMIC_DISPATCH_T(MatMul##Name)(task);                     \
      }

}  // namespace gkv

#endif  // GEMMAKV_OPS_MATMUL_KERNEL_H_
