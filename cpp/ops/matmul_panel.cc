#include <algorithm>

#include "base/rounding.h"
#include "ops/matmul_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_panel.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/matmul_block-inl.h"

// The products of many rows of activations, which are several tiles of up to
// kTileHeight rows. A chunk of tiles, a step's 128 rows of a prompt, passes the
// groups of weights together:
//   for each chunk of tiles
//     for each stretch of columns whose rows, laid out, stay in L2
//       for each group
//         for each panel of the stretch, which stays in L1
//           the first tile unpacks it; each adds its products to `out`
// What comes next is prefetched meanwhile.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Weights of a panel, the same for all types with such levels.
template <int bits, size_t parts, bool has_min>
struct PanelSource {
  static constexpr Levels kLevels = {bits, 0, parts, has_min};
  static constexpr size_t kDataBytes = kPanelBlockBytes;

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const uint8_t* data) {
    return hn::LoadU(DU8(), data + kQuad * kVectorBytes);
  }
};

// fn(PanelSource) with that of `levels`. Where it does not matter of how many
// bits weights are, one stands for all.
template <class Dot, class Fn>
void WithSource(const Levels& levels, const Fn& fn) {
  if (levels.has_min) {
    if (Dot::kPairs && levels.bits <= 4) return fn(PanelSource<4, 1, true>());
    return fn(PanelSource<5, 1, true>());
  }
  if (levels.parts == 2) return fn(PanelSource<6, 2, false>());
  if constexpr (Dot::kPairs) {
    if (levels.bits == 8) return fn(PanelSource<8, 1, false>());
  }
  fn(PanelSource<5, 1, false>());
}

inline constexpr size_t kChunkTiles = 128 / kTileHeight;
// Blocks of rows that are laid out at once.
inline constexpr size_t kTileBlocks = kChunkTiles * kPanelBlocks;
// The next panel's weights are prefetched while so many tiles pass this one.
inline constexpr size_t kPrefetchTiles = 2;
inline constexpr size_t kColumns = std::min(kSlices, kTileColumns);

// The columns from slice `slice` on.
template <class Dot, class Source, size_t kRows>
void PassTile(const TilePass& pass, const Panel& panel, size_t slice) {
  constexpr size_t kBlockPlanes = Planes(Source::kLevels) * kRowGroup;
  const DF32 df;
  VF32 acc[kColumns][kRows];
  const uint8_t* data[kColumns];
  size_t lanes[kColumns];
  float* const out = pass.out + slice * kLanes;
  Unroll<kColumns>([&](auto c) GKV_INLINE_ATTR {
    const size_t lane = (slice + c) * kLanes;
    data[c] = panel.weights + lane * sizeof(float);
    lanes[c] = pass.lanes <= lane ? 0 : std::min(kLanes, pass.lanes - lane);
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      acc[c][m] =
          pass.first == 0
              ? hn::Zero(df)
              : LoadUpTo(out + m * pass.out_stride + c * kLanes, lanes[c]);
    });
  });
  const float* planes = panel.planes + slice * kLanes;
  const uint8_t* ahead = slice == 0 ? pass.ahead : nullptr;
  const auto* rows =
      static_cast<const RowBlockOf<Dot, Source>*>(pass.rows);
  for (const auto* const end = rows + pass.blocks; rows != end; ++rows) {
    if (ahead != nullptr) {
      for (size_t i = 0; i < pass.ahead_step; i += kVectorBytes) {
        hwy::Prefetch(ahead + i);
      }
      ahead += pass.ahead_step;
    }
    AddBlock<Dot, Source>(data, *rows, planes, kLanes, acc);
    Unroll<kColumns>([&](auto c) GKV_INLINE_ATTR {
      data[c] += Source::kDataBytes;
    });
    planes += kBlockPlanes;
  }
  Unroll<kColumns>([&](auto c) GKV_INLINE_ATTR {
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      StoreUpTo(acc[c][m], out + m * pass.out_stride + c * kLanes, lanes[c]);
    });
  });
}

// A chunk of tiles, and blocks [first, end) of their columns.
template <class Rows>
struct Stretch {
  const Rows* rows;  // [tiles][stride], from `first` on
  size_t stride;
  size_t first, end;
  size_t tile, tiles;
};

// One group. The next one's stretch is prefetched, if there is one, or, with
// `rows_next`, the rows' next stretch, which follows this one.
template <class Dot, class Source>
void PassGroup(const MatMulKernel& kernel, const MatMulTask& task,
               const TileCut& cut, size_t group,
               const Stretch<RowBlockOf<Dot, Source>>& stretch, bool rows_next,
               Panel& panel) {
  const PackedView& weights = task.weights;
  const size_t all = weights.cols / kQuadBlock;
  const size_t group_bytes = GroupBytes(weights.type, weights.cols);
  const size_t block_bytes = group_bytes / all;
  TilePass pass = {};
  pass.group = weights.data + group * group_bytes;
  pass.out_stride = task.out_stride;
  pass.lanes = std::min(kRowGroup, weights.rows - group * kRowGroup);
  for (size_t b = stretch.first; b < stretch.end; b += kPanelBlocks) {
    pass.first = b;
    pass.blocks = std::min(kPanelBlocks, stretch.end - b);
    const bool last = b + kPanelBlocks >= stretch.end;
    const uint8_t* next = pass.group + (b + kPanelBlocks) * block_bytes;
    if (last) next = pass.group + group_bytes + stretch.first * block_bytes;
    // Also past the task's groups: the next call is likely to go on there.
    const bool more = !last || group + 1 < NumGroups(weights.rows);
    const size_t shares =
        more ? std::min(stretch.tiles - 1, kPrefetchTiles) : 0;
    for (size_t t = 0; t < stretch.tiles; ++t) {
      const size_t row = cut.Begin(stretch.tile + t);
      const auto* rows = stretch.rows + t * stretch.stride;
      pass.rows = rows + (b - stretch.first);
      pass.height = cut.Height(stretch.tile + t);
      pass.out = task.out + row * task.out_stride + group * kRowGroup;
      if (t == 0) {
        kernel.first_tile(pass, panel);
        continue;
      }
      pass.ahead = nullptr;
      if (last && rows_next) {
        pass.ahead_step = sizeof(*rows);
        pass.ahead = reinterpret_cast<const uint8_t*>(
            rows + (stretch.end - stretch.first));
      } else if (t <= shares) {
        pass.ahead_step = RoundUp(CeilDiv(block_bytes, shares), kVectorBytes);
        pass.ahead = next + (t - 1) * pass.blocks * pass.ahead_step;
      }
      Unroll<kTileHeight - kLeastHeight + 1>([&](auto m) HWY_ATTR {
        if (pass.height != kLeastHeight + m) return;
        for (size_t s = 0; s < kSlices; s += kColumns) {
          PassTile<Dot, Source, kLeastHeight + m>(pass, panel, s);
        }
      });
    }
  }
}

// What a thread needs.
template <class Rows>
struct PanelScratch {
  Panel panel;
  Rows rows[kTileBlocks];  // if the rows are not laid out already
};

template <class Dot, class Source>
void Products(const MatMulKernel& kernel, const MatMulTask& task) {
  using Rows = RowBlockOf<Dot, Source>;
  static_assert(sizeof(PanelScratch<Rows>) <= kMatMulScratchBytes);
  auto& scratch = *reinterpret_cast<PanelScratch<Rows>*>(task.scratch);
  const auto* laid_out = reinterpret_cast<const Rows*>(task.input.laid_out);
  const size_t all = task.weights.cols / kQuadBlock;
  const TileCut cut(task.input.rows);
  Stretch<Rows> stretch;
  for (stretch.tile = 0; stretch.tile < cut.tiles;
       stretch.tile += stretch.tiles) {
    stretch.tiles = std::min(kChunkTiles, cut.tiles - stretch.tile);
    const size_t most = std::min(
        all, kTileBlocks / stretch.tiles / kPanelBlocks * kPanelBlocks);
    for (size_t first = 0; first < all; first += most) {
      stretch.first = first;
      stretch.end = std::min(all, first + most);
      if (laid_out != nullptr) {
        stretch.rows = laid_out + stretch.tile * all + first;
        stretch.stride = all;
      } else {
        stretch.rows = scratch.rows;
        stretch.stride = most;
        for (size_t t = 0; t < stretch.tiles; ++t) {
          LayOutTile<Dot, Source>(
              task.input.quantized, kernel.levels.zero_point, all,
              cut.Begin(stretch.tile + t), cut.Height(stretch.tile + t), first,
              stretch.end - first, scratch.rows + t * most);
        }
      }
      for (size_t g = task.group_begin; g < task.group_end; ++g) {
        const bool rows_next = laid_out != nullptr && stretch.end < all &&
                               g + 1 == task.group_end;
        PassGroup<Dot, Source>(kernel, task, cut, g, stretch, rows_next,
                               scratch.panel);
      }
    }
  }
}

void MatMulPanelsOfTarget(const MatMulKernel& kernel, const MatMulTask& task) {
  WithCurrentDot([&](auto dot) HWY_ATTR {
    using Dot = decltype(dot);
    WithSource<Dot>(kernel.levels, [&](auto source) HWY_ATTR {
      Products<Dot, decltype(source)>(kernel, task);
    });
  });
}

RowLayout LayoutOfPanelRowsOfTarget(const Levels& levels, size_t rows,
                                    size_t cols) {
  const size_t tiles = TileCut(rows).tiles;
  RowLayout layout = {tiles, tiles * (cols / kQuadBlock)};
  WithCurrentDot([&](auto dot) HWY_ATTR {
    using Dot = decltype(dot);
    WithSource<Dot>(levels, [&](auto source) HWY_ATTR {
      using Source = decltype(source);
      layout.bytes *= sizeof(RowBlockOf<Dot, Source>);
      if (rows <= kStreamRows<Dot, Source>) layout = {0, 0};
    });
  });
  return layout;
}

void LayOutPanelRowsOfTarget(const Levels& levels, const MatMulInput& input,
                             size_t cols, size_t tile, uint8_t* out) {
  const size_t all = cols / kQuadBlock;
  const TileCut cut(input.rows);
  WithCurrentDot([&](auto dot) HWY_ATTR {
    using Dot = decltype(dot);
    WithSource<Dot>(levels, [&](auto source) HWY_ATTR {
      using Source = decltype(source);
      LayOutTile<Dot, Source>(
          input.quantized, levels.zero_point, all, cut.Begin(tile),
          cut.Height(tile), 0, all,
          reinterpret_cast<RowBlockOf<Dot, Source>*>(out) + tile * all);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(MatMulPanelsOfTarget);
HWY_EXPORT(LayoutOfPanelRowsOfTarget);
HWY_EXPORT(LayOutPanelRowsOfTarget);

RowLayout LayoutOfPanelRows(const Levels& levels, size_t rows, size_t cols) {
  return HWY_DYNAMIC_DISPATCH(LayoutOfPanelRowsOfTarget)(levels, rows, cols);
}

void LayOutPanelRows(const Levels& levels, const MatMulInput& input,
                     size_t cols, size_t tile, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(LayOutPanelRowsOfTarget)(levels, input, cols, tile, out);
}

void MatMulPanels(const MatMulKernel& kernel, const MatMulTask& task) {
  HWY_DYNAMIC_DISPATCH(MatMulPanelsOfTarget)(kernel, task);
}

}  // namespace gkv

#endif  // HWY_ONCE
