#ifndef GEMMAKV_OPS_MATMUL_KERNEL_H_
#define GEMMAKV_OPS_MATMUL_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "ops/matmul.h"
#include "ops/quad_layout.h"

// What a weight type provides. Internal to ops.
//
// Products of floats have a kernel of their own (matmul_float.cc). Those of
// quantized weights have two. Few rows of activations are one tile, or two that
// pass each block together: the stream of the type (matmul_stream-inl.h) reads
// each weight once. Many rows are several tiles: the first tile unpacks a
// stretch of a group to a panel while it computes, and the kernel of panels
// (matmul_panel.cc) computes the others from it. A panel looks the same for all
// types.

namespace gkv {

// The numbers that are stored for quantized weights; all zero for floats.
struct Levels {
  int bits;
  int zero_point;  // 0 with a minimum
  size_t parts;    // scales per block: 2 for Q6_K, else 1
  bool has_min;    // whether a minimum is subtracted
};

// Floats of scales of a block and row of weights.
constexpr size_t Planes(const Levels& levels) {
  return levels.parts + (levels.has_min ? 1 : 0);
}

// A stretch of at most kPanelBlocks blocks of a group: a byte a weight, and
// scales as floats.
inline constexpr size_t kPanelBlocks = 32;
inline constexpr size_t kPanelBlockBytes = kQuads * kVectorBytes;
struct Panel {
  alignas(64) uint8_t weights[kPanelBlocks * kPanelBlockBytes];
  // [blocks][Planes][kRowGroup]: the scales of the parts, then the negated
  // minimum.
  alignas(64) float planes[kPanelBlocks * 2 * kRowGroup];
};

// The products of a tile of rows with a stretch of a group.
struct TilePass {
  const uint8_t* group;
  size_t first, blocks;  // of the stretch; the first begins a unit
  const void* rows;      // RowBlock (matmul_block-inl.h) of the first block
  size_t height;
  float* out;  // of the first row; products are added but for the first block
  size_t out_stride;
  size_t lanes;          // that are rows of weights
  const uint8_t* ahead;  // what to prefetch meanwhile, or null
  size_t ahead_step;     // bytes of it a block
};

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
  Levels levels;
  void (*pack_group)(const uint8_t* source, size_t rows, size_t cols,
                     uint8_t* group);
  // Row `row` (0..15) of a group.
  void (*unpack_row)(const uint8_t* group, size_t row, size_t cols, float* out);
  // Of the 16 rows of a group, as SquaredNorms() has it.
  void (*squared_norms)(const uint8_t* group, size_t cols, float* out);
  // Of quantized weights for the rows that are no tiles of LayoutOfRows().
  void (*matmul)(const MatMulTask& task);
  // The pass that unpacks the stretch. Null for floats.
  void (*first_tile)(const TilePass& pass, Panel& panel);
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

// LayoutOfRows(), LayOutRows() and MatMul() for many rows of weights of such
// levels.
RowLayout LayoutOfPanelRows(const Levels& levels, size_t rows, size_t cols);
void LayOutPanelRows(const Levels& levels, const MatMulInput& input,
                     size_t cols, size_t tile, uint8_t* out);
void MatMulPanels(const MatMulKernel& kernel, const MatMulTask& task);

// After the last target, in namespace gkv: defines kMatMul<Name> by what the
// class Kernel<Name> of every target has. Packing is no work for SIMD: that of
// one target serves all. The first is for kernels that read floats, the second
// for those that read quantized activations.
#define GKV_FLOAT_MATMUL_KERNEL(Name) GKV_DEFINE_MATMUL(Name, nullptr)
#define GKV_MATMUL_KERNEL(Name)                                       \
  HWY_EXPORT_T(FirstTile##Name, Kernel##Name::FirstTile);             \
  GKV_DEFINE_MATMUL(Name, [](const TilePass& pass, Panel& panel) {    \
    HWY_DYNAMIC_DISPATCH_T(FirstTile##Name)(pass, panel);             \
  })
#define GKV_DEFINE_MATMUL(Name, first_tile)                           \
  HWY_EXPORT_T(MatMul##Name, Kernel##Name::MatMul);                   \
  HWY_EXPORT_T(SquaredNorms##Name, Kernel##Name::SquaredNorms);       \
  const MatMulKernel kMatMul##Name = {                                \
      HWY_NAMESPACE::Kernel##Name::kLevels,                           \
      HWY_NAMESPACE::Kernel##Name::PackGroup,                         \
      HWY_NAMESPACE::Kernel##Name::UnpackRow,                         \
      [](const uint8_t* group, size_t cols, float* out) {             \
        HWY_DYNAMIC_DISPATCH_T(SquaredNorms##Name)(group, cols, out); \
      },                                                              \
      [](const MatMulTask& task) {                                    \
        HWY_DYNAMIC_DISPATCH_T(MatMul##Name)(task);                   \
      },                                                              \
      first_tile}

}  // namespace gkv

#endif  // GEMMAKV_OPS_MATMUL_KERNEL_H_
