// Driver of the products of quantized weights with 8-bit activations, shared by
// matmul_<type>.cc. Included once per Highway target.

#if defined(GEMMAKV_OPS_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_MATMUL_INL_H_
#undef GEMMAKV_OPS_MATMUL_INL_H_
#else
#define GEMMAKV_OPS_MATMUL_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/rounding.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/matmul_common-inl.h"
#include "ops/matmul_kernel.h"
#include "ops/quad_layout.h"

// The arithmetic, the same for every shape and target: for each output value
//   acc = 0
//   for each block of 32 columns, ascending
//     for each part (16 columns for Q6_K, else the whole block)
//       acc = fma(float(dot), weight_scale * activation_scale, acc)
//     Q4_K, Q5_K: acc = fma(-weight_min, activation_scale * float(sum), acc)
// where dot, the exact integer product, already excludes the zero point. One
// accumulator per output, never split; only how many outputs are in flight
// differs between shapes.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// How weights are read depends on how many rows of activations there are.
//
// Few rows, at most kStreamRows: the processor has little to do for a weight,
// so reading is what counts. Groups are read from end to end, each once, as
// streams that the processor reads ahead of by itself: those of a tile are far
// from each other, each the next of a long stretch. (One row of Q4_0, 12288 x
// 1536 and 1536 x 6144 from memory, two threads, GB/s where bare reading makes
// 49: 41, of neighbouring groups 28, of two that prefetch 22.) Sums stay in
// registers until a group is done.
//
// More rows: they are divided into tiles, and a panel of blocks of two groups
// stays in L1 while all tiles pass.

// With up to 8 rows, one column of a tile's sums fits the registers of AVX-512:
// each weight is unpacked once.
inline constexpr size_t kStreamRows = kSlices == 1 ? 8 : kTileRows;
inline constexpr size_t kWideRows = 2;
inline constexpr size_t kWideColumns = kSlices == 1 ? 4 : kTileColumns;
// Columns of a tile of `rows` rows.
constexpr size_t StreamColumns(size_t rows) {
  return rows <= kWideRows   ? kWideColumns
         : rows <= kTileRows ? kTileColumns
                             : 1;
}
constexpr size_t StreamGroups(size_t rows) {
  return std::max<size_t>(1, StreamColumns(rows) / kSlices);
}
// So many blocks' rows are prepared at once; they stay in L2.
inline constexpr size_t kStreamBlocks = 384;
// How far ahead streams are prefetched, in units.
inline constexpr size_t kUnitsAhead = 2;

// A panel is as many blocks as keep two groups of unpacked weights and a tile
// of activations in L1.
inline constexpr size_t kPanelBlocks = 24;
// With few tiles also what is prefetched behind it (8 rows of Q4_K: 1.1 times
// as fast as with 24).
inline constexpr size_t kShortPanelBlocks = 16;
inline constexpr size_t kShortPanelTiles = 4;
// The 128 rows of a prompt's step are one chunk with AVX-512.
inline constexpr size_t kChunkTiles = 22;
inline constexpr size_t kChunkRows = kChunkTiles * kTileRows;
// So many that what rows contribute is prepared once for a task of a prompt.
inline constexpr size_t kChunkGroups = 24;

// Of `blocks` blocks, from the first of a unit on.
template <class Format>
constexpr size_t ScaleBytes(size_t blocks) {
  // A source block is so many of ours.
  constexpr size_t kBlocks = Info(Format::kType).values / kQuadBlock;
  return CeilDiv(blocks, kBlocks) * Format::kScaleBytes;
}

// Where things are in a group of `blocks` blocks.
template <class Format>
struct GroupLayout {
  static constexpr size_t kUnit = Format::kUnitBlocks;
  static constexpr size_t kUnitBytes =
      kUnit * Format::kDataBytes + ScaleBytes<Format>(kUnit);

  // The scales of the unit that `block` is in.
  static constexpr size_t Scales(size_t block) {
    return block / kUnit * kUnitBytes;
  }
  static constexpr size_t Data(size_t block, size_t blocks) {
    const size_t in_unit = block % kUnit;
    return Scales(block) +
           ScaleBytes<Format>(std::min(kUnit, blocks - (block - in_unit))) +
           in_unit * Format::kDataBytes;
  }
};

// The rows of a chunk are divided into tiles of nearly equal size.
struct Tiles {
  explicit Tiles(size_t rows)
      : rows(rows), count(CeilDiv(rows, kTileRows)) {}

  size_t Begin(size_t tile) const { return rows * tile / count; }
  // The fewer tiles there are, the more panels' factors of theirs there is room
  // for; with as many, groups of weights are read from one end to the other.
  size_t MaxBlocks() const { return kChunkTiles / count * kPanelBlocks; }

  size_t rows, count;
};

// What kRows rows contribute to a block, besides their values. `start` is
// -zero_point * sum per part; types with a minimum have activation_scale * sum
// instead.
template <class Format, size_t kRows>
struct BlockFactors {
  float scale[kRows];
  union {
    int32_t start[Format::kParts][kRows];
    float scaled_sum[kRows];
  };
};

template <class Format>
inline constexpr size_t kPlanes = Format::kParts + (Format::kHasMin ? 1 : 0);
// Floats from column to column of a tile in the decoded scales of `blocks`
// blocks of each group: [groups][blocks][kPlanes][kRowGroup], the scales per
// part, then the negated minimum.
template <class Format>
constexpr size_t PlaneStep(size_t blocks) {
  return kSlices == 1 ? blocks * kPlanes<Format> * kRowGroup : kLanes;
}

// Sum of 16 values.
HWY_INLINE int32_t SumOf16(const int8_t* values) {
  const hn::FixedTag<int8_t, 16> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Repartition<uint64_t, decltype(d)> du64;
  const auto biased =
      hn::Xor(hn::BitCast(du, hn::LoadU(d, values)), hn::Set(du, 0x80));
  const uint64_t sum = hn::ReduceSum(du64, hn::SumsOf8(biased));
  return static_cast<int32_t>(sum) - 16 * 128;
}

// Of row `m` of `factors`; `at` is the block in all of the input.
template <class Format, size_t kRows>
HWY_INLINE void SetFactors(const QuantizedRows& input, size_t at, size_t m,
                           BlockFactors<Format, kRows>& factors) {
  const float scale = input.scales[at];
  const int32_t sum = input.sums[at];
  factors.scale[m] = scale;
  if constexpr (Format::kHasMin) {
    factors.scaled_sum[m] = scale * static_cast<float>(sum);
  } else if constexpr (Format::kParts == 1) {
    factors.start[0][m] = -Format::kZeroPoint * sum;
  } else {
    const int32_t half = SumOf16(input.values + at * kQuadBlock);
    factors.start[0][m] = -Format::kZeroPoint * half;
    factors.start[1][m] = -Format::kZeroPoint * (sum - half);
  }
}

// Whether there is an instruction that sums products of unsigned with signed
// bytes into i32 without saturating in between. Where there is only the one
// that saturates to i16 (maddubs), weights up to 63 cannot reach the limit; for
// 8-bit ones it multiplies |weight| with the activation under the weight's
// sign: 2 * 128 * 127 fits. Then the zero point is gone from the start. Weights
// of fewer bits leave room for sums of several quads in 16 bits.
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3_DL && HWY_TARGET <= HWY_SSSE3
inline constexpr bool kSaturatingDot = true;
#else
inline constexpr bool kSaturatingDot = false;
#endif
template <class Format>
inline constexpr bool kSignedDot = kSaturatingDot&& Format::kZeroPoint == 128;

using DI16 = hn::Repartition<int16_t, DU8>;
using VI16 = hn::Vec<DI16>;

// How many quads of a part may be summed in 16 bits: 8 of Q4_0, 1 of Q8_0.
template <class Format>
constexpr size_t PairSums() {
  if (!kSaturatingDot || kSignedDot<Format>) return 1;
  constexpr size_t kBits = Format::kDataBytes / kVectorBytes;
  constexpr size_t kMost = 2 * ((1 << kBits) - 1) * 128;  // of one pair
  return std::min(kQuads / Format::kParts, size_t{32767} / kMost);
}

// sum + the products of 4 adjacent weights and activations. Exact.
template <class Format>
HWY_INLINE VI32 AddQuad(VU8 weights, hn::Vec<DI8> x, VI32 sum) {
  return hn::SumOfMulQuadAccumulate(DI32(), weights, x, sum);
}

// The same, the first two products and the last two for themselves; `first`:
// `sum` counts as 0. Requires: kSaturatingDot.
template <class Format>
HWY_INLINE VI16 AddPairs(VU8 weights, hn::Vec<DI8> x, VI16 sum, bool first) {
  if constexpr (kSignedDot<Format>) {
    const auto w = hn::BitCast(DI8(), hn::Xor(weights, hn::Set(DU8(), 0x80)));
    weights = hn::BitCast(DU8(), hn::Abs(w));
    x = hn::IfNegativeThenNegOrUndefIfZero(w, x);
  }
  VI16 pairs = hn::SatWidenMulPairwiseAdd(DI16(), weights, x);
  if (!first) pairs = hn::Add(sum, pairs);
  KeepOrder(pairs);
  return pairs;
}

// dot[c][m] += quads of part `kPart` of column c and row m.
template <class Format, size_t kPart, size_t kCols, size_t kRows>
HWY_INLINE void DotPart(const uint8_t* const (&data)[kCols],
                        const int8_t* const (&values)[kRows],
                        VI32 (&dot)[kCols][kRows]) {
  // One value alone would wait for each of its sums.
  constexpr bool kTwoSums = !kSaturatingDot && kCols * kRows == 1;
  [[maybe_unused]] VI32 odd = hn::Zero(DI32());
  constexpr size_t kCount = kQuads / Format::kParts;
  constexpr size_t kSums = PairSums<Format>();
  static_assert(kCount % kSums == 0);
  [[maybe_unused]] VI16 sums[kCols][kRows];
  Unroll<kCount>([&](auto i) GKV_INLINE_ATTR {
    // Both nibbles of a vector, one after the other.
    constexpr size_t kQuad = kCount == kQuads
                                 ? i % 2 * (kQuads / 2) + i / 2
                                 : kPart * kCount + i;
    VU8 weights[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      weights[c] = Format::template Quad<kQuad>(data[c]);
    });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      int32_t four;
      std::memcpy(&four, values[m] + 4 * kQuad, sizeof(four));
      const auto broadcast = hn::BitCast(DI8(), hn::Set(DI32(), four));
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        if constexpr (kTwoSums && i % 2 == 1) {
          odd = AddQuad<Format>(weights[c], broadcast, odd);
        } else if constexpr (!kSaturatingDot) {
          dot[c][m] = AddQuad<Format>(weights[c], broadcast, dot[c][m]);
        } else {
          sums[c][m] = AddPairs<Format>(weights[c], broadcast, sums[c][m],
                                        i % kSums == 0);
          if constexpr (i % kSums == kSums - 1) {
            const auto ones = hn::Set(DI16(), int16_t{1});
            dot[c][m] = hn::Add(
                dot[c][m], hn::WidenMulPairwiseAdd(DI32(), sums[c][m], ones));
          }
        }
      });
    });
  });
  if constexpr (kTwoSums) dot[0][0] = hn::Add(dot[0][0], odd);
}

// acc[c][m] += the products of a block. `values` are the rows' in this block,
// `planes` the scales of column 0, those of the next `plane_step` further.
template <class Format, size_t kCols, size_t kRows, size_t kFactorRows>
HWY_INLINE void AddBlock(const uint8_t* const (&data)[kCols],
                         const int8_t* const (&values)[kRows],
                         const BlockFactors<Format, kFactorRows>& factors,
                         const float* planes, size_t plane_step,
                         VF32 (&acc)[kCols][kRows]) {
  const DF32 df;
  const DI32 di;
  Unroll<Format::kParts>([&](auto part) GKV_INLINE_ATTR {
    VI32 dot[kCols][kRows];
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      VI32 start = hn::Zero(di);
      if constexpr (Format::kZeroPoint != 0 && !kSignedDot<Format>) {
        start = hn::Set(di, factors.start[part][m]);
      }
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR { dot[c][m] = start; });
    });
    DotPart<Format, part>(data, values, dot);
    VF32 scale[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      scale[c] = hn::LoadU(df, planes + c * plane_step + part * kRowGroup);
    });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      const VF32 row_scale = hn::Set(df, factors.scale[m]);
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        acc[c][m] = hn::MulAdd(hn::ConvertTo(df, dot[c][m]),
                               hn::Mul(scale[c], row_scale), acc[c][m]);
      });
    });
  });
  if constexpr (Format::kHasMin) {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      const VF32 min = hn::LoadU(
          df, planes + c * plane_step + Format::kParts * kRowGroup);
      Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
        acc[c][m] =
            hn::MulAdd(min, hn::Set(df, factors.scaled_sum[m]), acc[c][m]);
      });
    });
  }
}

// --- Few rows ---------------------------------------------------------------

// All that a block's products need of the rows, side by side: rows far apart
// would share sets of L1 (6,144 columns: 1.3 times the time of 8 rows) and take
// a register each for their addresses.
template <class Format>
struct StreamBlock {
  BlockFactors<Format, kStreamRows> factors;
  int8_t values[kStreamRows][kQuadBlock];
};

// Blocks [first, + count) of a product with few rows.
template <class Format>
struct StreamInput {
  size_t first, count;
  size_t all;  // of a row
  size_t rows;
  StreamBlock<Format> blocks[kStreamBlocks];

  // Blocks from `begin` on, as many as there is room for.
  void Prepare(const QuantizedRows& input, size_t begin) {
    first = begin;
    count = std::min(kStreamBlocks, all - begin);
    for (size_t m = 0; m < rows; ++m) {
      for (size_t b = 0; b < count; ++b) {
        const size_t at = m * all + first + b;
        SetFactors<Format>(input, at, m, blocks[b].factors);
        std::memcpy(blocks[b].values[m], input.values + at * kQuadBlock,
                    kQuadBlock);
      }
    }
  }
};

// A column of few rows' products.
struct StreamColumn {
  const uint8_t* group;
  size_t slice;  // of the group
  float* out;    // of the first row
  size_t lanes;  // that are rows of weights
};

// out[m * stride + lane] = the products of the input's blocks, behind what is
// there if these are not a row's first.
template <class Format, size_t kCols, size_t kRows>
void Stream(const StreamColumn (&columns)[kWideColumns],
            const StreamInput<Format>& input, size_t out_stride) {
  using Layout = GroupLayout<Format>;
  constexpr size_t kUnit = Layout::kUnit;
  constexpr size_t kGroups = kSlices == 1 ? kCols : 1;
  // Where the products take longer than reading (cycles for a row and block,
  // bytes of the block), the processor does not read far enough ahead.
  constexpr size_t kCycles = kQuads + 2 * Format::kParts + Format::kHasMin;
  constexpr bool kPrefetch = 8 * kRows * kCycles * kUnit >= Layout::kUnitBytes;
  constexpr size_t kAhead = kUnitsAhead * Layout::kUnitBytes;
  constexpr size_t kStep = PlaneStep<Format>(kUnit);
  HWY_ALIGN float planes[kGroups][kUnit][kPlanes<Format>][kRowGroup];
  const DF32 df;
  VF32 acc[kCols][kRows];
  Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      acc[c][m] = input.first == 0
                      ? hn::Zero(df)
                      : LoadUpTo(columns[c].out + m * out_stride,
                                 columns[c].lanes);
    });
  });
  const size_t skipped = Layout::Scales(input.first);
  const uint8_t* units[kGroups];
  for (size_t g = 0; g < kGroups; ++g) units[g] = columns[g].group + skipped;
  const StreamBlock<Format>* block = input.blocks;
  for (size_t left = input.count; left != 0;) {
    const size_t count = std::min(kUnit, left);
    left -= count;
    for (size_t g = 0; g < kGroups; ++g) {
      Format::DecodeScales(units[g], 0, count, &planes[g][0][0][0]);
      if constexpr (kPrefetch) {
        for (size_t i = 0; i < ScaleBytes<Format>(kUnit); i += kVectorBytes) {
          hwy::Prefetch(units[g] + kAhead + i);
        }
      }
    }
    const uint8_t* data[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      data[c] = units[c % kGroups] + ScaleBytes<Format>(count) +
                columns[c].slice * kLanes * sizeof(float);
    });
    const float* plane = &planes[0][0][0][0] + columns[0].slice * kLanes;
    for (size_t b = 0; b < count; ++b, ++block) {
      if constexpr (kPrefetch) {
        // Not Unroll: GCC takes a lambda that only prefetches for a no-op.
        for (size_t c = 0; c < kGroups; ++c) {
          for (size_t i = 0; i < Format::kDataBytes; i += kVectorBytes) {
            hwy::Prefetch(data[c] + kAhead + i);
          }
        }
      }
      const int8_t* values[kRows];
      Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
        values[m] = block->values[m];
      });
      AddBlock<Format>(data, values, block->factors, plane, kStep, acc);
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        data[c] += Format::kDataBytes;
      });
      plane += kPlanes<Format> * kRowGroup;
    }
    for (size_t g = 0; g < kGroups; ++g) units[g] += Layout::kUnitBytes;
  }
  Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      StoreUpTo(acc[c][m], columns[c].out + m * out_stride, columns[c].lanes);
    });
  });
}

// `groups` (1..StreamGroups) groups of weights, `spread` groups apart.
template <class Format>
void StreamTile(const MatMulTask& task, size_t first, size_t groups,
                size_t spread, const StreamInput<Format>& input) {
  const PackedView& weights = task.weights;
  const size_t group_bytes = GroupBytes(Format::kType, weights.cols);
  StreamColumn columns[StreamGroups(1) * kSlices];
  for (size_t c = 0; c < groups * kSlices; ++c) {
    const size_t group = first + c / kSlices * spread;
    const size_t slice = c % kSlices;
    const size_t lane = group * kRowGroup + slice * kLanes;
    columns[c] = {weights.data + group * group_bytes, slice, task.out + lane,
                  weights.rows <= lane
                      ? 0
                      : std::min(kLanes, weights.rows - lane)};
  }
  size_t c = 0;
  const auto go_on = [&](auto width, auto most_rows) {
    for (; c + width <= groups * kSlices; c += width) {
      StreamColumn at[kWideColumns];
      std::copy_n(columns + c, size_t{width}, at);
      Unroll<most_rows>([&](auto m) HWY_ATTR {
        if (input.rows == m + 1) {
          Stream<Format, width, m + 1>(at, input, task.out_stride);
        }
      });
    }
  };
  if constexpr (kWideColumns > kTileColumns) {
    if (input.rows <= kWideRows) {
      go_on(std::integral_constant<size_t, kWideColumns>(),
            std::integral_constant<size_t, kWideRows>());
    }
  }
  if (input.rows <= kTileRows) {
    go_on(std::integral_constant<size_t, kTileColumns>(),
          std::integral_constant<size_t, kTileRows>());
  }
  go_on(std::integral_constant<size_t, 1>(),
        std::integral_constant<size_t, kStreamRows>());
}

// The products of 1 to kStreamRows rows.
template <class Format>
void MatMulFewRows(const MatMulTask& task) {
  StreamInput<Format> input;
  input.rows = task.input.rows;
  input.all = task.weights.cols / kQuadBlock;
  // Each of the places that are read at once is a stretch of its own.
  const size_t at_once = StreamGroups(input.rows);
  const size_t stretch = (task.group_end - task.group_begin) / at_once;
  const size_t rest = task.group_begin + stretch * at_once;
  for (size_t b = 0; b < input.all; b += kStreamBlocks) {
    input.Prepare(task.input.quantized, b);
    for (size_t g = 0; g < stretch; ++g) {
      StreamTile(task, task.group_begin + g, at_once, stretch, input);
    }
    if (rest < task.group_end) {
      StreamTile(task, rest, task.group_end - rest, 1, input);
    }
  }
}

// --- More rows --------------------------------------------------------------

// Rows [first_row, + rows) of the input in blocks [first_block, + blocks).
struct Region {
  size_t first_row, rows;
  size_t first_block, blocks;
};

template <class Format>
using TileFactors = BlockFactors<Format, kTileRows>;
// [tiles][blocks] of a region.
template <class Format>
using RowFactors = TileFactors<Format>[kChunkTiles * kPanelBlocks];

template <class Format>
struct Scratch {
  HWY_ALIGN float acc[kChunkGroups][kChunkRows][kRowGroup];
  HWY_ALIGN float planes[kTileGroups][kPanelBlocks][kPlanes<Format>][kRowGroup];
  RowFactors<Format> rows;
};

template <class Format>
void PrepareRows(const QuantizedRows& input, size_t cols, const Region& region,
                 RowFactors<Format>& out) {
  const Tiles tiles(region.rows);
  for (size_t t = 0; t < tiles.count; ++t) {
    const size_t first = tiles.Begin(t);
    for (size_t m = first; m < tiles.Begin(t + 1); ++m) {
      const size_t at =
          (region.first_row + m) * (cols / kQuadBlock) + region.first_block;
      for (size_t b = 0; b < region.blocks; ++b) {
        SetFactors<Format>(input, at + b, m - first,
                           out[t * region.blocks + b]);
      }
    }
  }
}

// One column of a tile: where its lanes start.
struct Column {
  const uint8_t* data;   // of the panel's first block
  const float* planes;   // [blocks][kPlanes][kRowGroup]
  float* acc;            // [rows][kRowGroup]
  const uint8_t* ahead;  // what to prefetch meanwhile; null: nothing
  float* out;            // of the first row, once all panels are in
  size_t out_lanes;      // that are rows of weights
};

// Blocks [first, + blocks) of a region.
struct Panel {
  size_t first, blocks;
  size_t in_unit;  // of the first block's unit, so many blocks are left
  // From the end of each unit to the next one's data.
  size_t jumps[kPanelBlocks / kUnitBlocks];
  size_t ahead;  // bytes to prefetch with a block
};

// The activations of a tile.
template <class Format>
struct TileInput {
  const int8_t* values;  // of the first row and block
  size_t stride;         // bytes from row to row
  const TileFactors<Format>* factors;  // of the first block
  const Panel* panel;
};

template <class Format, size_t kCols, size_t kRows>
void Tile(const Column* columns, const TileInput<Format>& input) {
  constexpr size_t kStep = PlaneStep<Format>(kPanelBlocks);
  const DF32 df;
  const Panel& panel = *input.panel;
  const uint8_t* data[kCols];
  const int8_t* values[kRows];
  VF32 acc[kCols][kRows];
  Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
    values[m] = input.values + m * input.stride;
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      acc[c][m] = hn::LoadU(df, columns[c].acc + m * kRowGroup);
    });
  });
  Unroll<kCols>([&](auto c) GKV_INLINE_ATTR { data[c] = columns[c].data; });
  const float* planes = columns[0].planes;

  size_t in_unit = panel.in_unit;
  const size_t* jump = panel.jumps;
  for (size_t b = 0; b < panel.blocks; ++b) {
    // Not Unroll: GCC takes a lambda that only prefetches for a no-op.
    for (size_t c = 0; c < kCols; ++c) {
      if (columns[c].ahead == nullptr) continue;
      for (size_t i = 0; i < panel.ahead; i += kVectorBytes) {
        hwy::Prefetch(columns[c].ahead + b * panel.ahead + i);
      }
    }
    AddBlock<Format>(data, values, input.factors[b], planes, kStep, acc);
    size_t step = Format::kDataBytes;
    if (--in_unit == 0) {
      step += *jump++;
      in_unit = Format::kUnitBlocks;
    }
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR { data[c] += step; });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR { values[m] += kQuadBlock; });
    planes += kPlanes<Format> * kRowGroup;
  }

  Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      hn::StoreU(acc[c][m], df, columns[c].acc + m * kRowGroup);
    });
  });
}

// The least that a tile of more than kStreamRows rows can have.
inline constexpr size_t kMinTileRows =
    (kStreamRows + 1) / CeilDiv(kStreamRows + 1, kTileRows);

// Tile with `rows` in [kMinTileRows, kTileRows].
template <class Format, size_t kCols>
void TileOfRows(size_t rows, const Column* columns,
                const TileInput<Format>& input) {
  Unroll<kTileRows - kMinTileRows + 1>([&](auto m) HWY_ATTR {
    constexpr size_t kRows = kMinTileRows + m;
    if (rows == kRows) Tile<Format, kCols, kRows>(columns, input);
  });
}

// The sums of a tile's rows, to where they belong. Right behind the tile: the
// next one's products hide what writing takes. Of a copy of a whole chunk the
// processor waited for every line (5% of the time of embeddings).
template <size_t kCols>
HWY_INLINE void StoreTile(size_t rows, const Column* columns,
                          size_t first_row, size_t out_stride) {
  const DF32 df;
  for (size_t m = 0; m < rows; ++m) {
    const size_t at = (first_row + m) * out_stride;
    for (size_t c = 0; c < kCols; ++c) {
      const float* acc = columns[c].acc + m * kRowGroup;
      if (columns[c].out_lanes == kLanes) {
        hn::StoreU(hn::LoadU(df, acc), df, columns[c].out + at);
      } else if (columns[c].out_lanes != 0) {
        hn::StoreN(hn::LoadU(df, acc), df, columns[c].out + at,
                   columns[c].out_lanes);
      }
    }
  }
}

// All rows of a region's panel, in tiles; with the last panel, their sums are
// stored.
template <class Format, size_t kCols>
void AllRows(const Column* columns, const QuantizedRows& input,
             size_t cols, const Region& region, const Panel& panel,
             const RowFactors<Format>& factors, size_t out_stride) {
  const size_t first_block = region.first_block + panel.first;
  const bool complete = first_block + panel.blocks == cols / kQuadBlock;
  const Tiles tiles(region.rows);
  for (size_t t = 0; t < tiles.count; ++t) {
    const size_t row = tiles.Begin(t), rows = tiles.Begin(t + 1) - row;
    Column at[kCols];
    for (size_t c = 0; c < kCols; ++c) {
      at[c] = columns[c];
      at[c].acc += row * kRowGroup;
      // Prefetching is shared by the first tiles.
      if (tiles.count > 1 && t != c) at[c].ahead = nullptr;
    }
    const TileInput<Format> tile = {
        input.values + (region.first_row + row) * cols +
            first_block * kQuadBlock,
        cols, factors + t * region.blocks + panel.first, &panel};
    TileOfRows<Format, kCols>(rows, at, tile);
    if (complete) StoreTile<kCols>(rows, at, row, out_stride);
  }
}

// Where the sums of some groups belong: out [region.rows, stride].
struct Destination {
  float* out;
  size_t stride;
  size_t count;  // of the groups' rows of weights; the others are padding
};

// Adds the region's products with `groups` (1..kTileGroups) groups to `acc`
// [groups][kChunkRows][kRowGroup], and stores the sums that are complete. The
// weights that are next are prefetched; with `more`, also the next groups'.
template <class Format>
void TileGroups(const uint8_t* packed, size_t groups, size_t cols,
                const QuantizedRows& input, const Region& region, bool more,
                Scratch<Format>& scratch, float* acc,
                const Destination& destination) {
  using Layout = GroupLayout<Format>;
  const size_t group_bytes = GroupBytes(Format::kType, cols);
  const size_t blocks = cols / kQuadBlock;
  const size_t panel_blocks = Tiles(region.rows).count <= kShortPanelTiles
                                  ? kShortPanelBlocks
                                  : kPanelBlocks;
  for (size_t first = 0; first < region.blocks; first += panel_blocks) {
    const size_t block = region.first_block + first;
    Panel panel = {first,
                   std::min(panel_blocks, region.blocks - first),
                   Format::kUnitBlocks - block % Format::kUnitBlocks,
                   {},
                   0};
    size_t* jump = panel.jumps;
    for (size_t b = panel.in_unit; b < panel.blocks; b += Format::kUnitBlocks) {
      *jump++ = Layout::Data(block + b, blocks) - Format::kDataBytes -
                Layout::Data(block + b - 1, blocks);
    }
    const size_t data = Layout::Data(block, blocks);
    // The panel that is read behind this one, with its scales.
    size_t next = 0, next_bytes = 0;
    if (panel.blocks < region.blocks - first || more) {
      const bool is_here = panel.blocks < region.blocks - first;
      const size_t from = is_here ? block + panel.blocks : region.first_block;
      const size_t end = std::min(from + panel_blocks,
                                  region.first_block + region.blocks);
      next = Layout::Data(from, blocks);
      if (from % Format::kUnitBlocks == 0) next = Layout::Scales(from);
      next_bytes = Layout::Data(end - 1, blocks) + Format::kDataBytes - next;
      next += is_here ? 0 : kTileGroups * group_bytes;
      panel.ahead = RoundUp(CeilDiv(next_bytes, panel.blocks), kVectorBytes);
    }
    Column columns[kTileGroups * kSlices];
    for (size_t g = 0; g < groups; ++g) {
      const uint8_t* group = packed + g * group_bytes;
      float* planes = &scratch.planes[g][0][0][0];
      for (size_t b = 0, count = panel.in_unit; b < panel.blocks;
           b += count, count = Format::kUnitBlocks) {
        count = std::min(count, panel.blocks - b);
        Format::DecodeScales(group + Layout::Scales(block + b),
                             (block + b) % Format::kUnitBlocks, count,
                             planes + b * kPlanes<Format> * kRowGroup);
      }
      for (size_t s = 0; s < kSlices; ++s) {
        const size_t lane = g * kRowGroup + s * kLanes;
        columns[g * kSlices + s] = {
            group + data + s * kLanes * sizeof(float),
            planes + s * kLanes,
            acc + g * kChunkRows * kRowGroup + s * kLanes,
            next_bytes == 0 ? nullptr : group + next,
            destination.out + lane,
            destination.count <= lane
                ? 0
                : std::min(kLanes, destination.count - lane)};
      }
    }
    const size_t end = groups * kSlices;
    size_t c = 0;
    const auto tile_columns = [&](auto width) {
      for (; c + width <= end; c += width) {
        AllRows<Format, width>(columns + c, input, cols, region, panel,
                               scratch.rows, destination.stride);
      }
    };
    tile_columns(std::integral_constant<size_t, kTileColumns>());
    tile_columns(std::integral_constant<size_t, 1>());
  }
}

// The products of more than kStreamRows rows.
template <class Format>
void MatMulManyRows(const MatMulTask& task) {
  const auto [weights, input, group_begin, group_end, out, out_stride] = task;
  const size_t cols = weights.cols;
  const size_t blocks = cols / kQuadBlock;
  const size_t group_bytes = GroupBytes(Format::kType, cols);
  Scratch<Format> scratch;
  for (size_t g0 = group_begin; g0 < group_end; g0 += kChunkGroups) {
    const size_t groups = std::min(kChunkGroups, group_end - g0);
    for (size_t m0 = 0; m0 < input.rows; m0 += kChunkRows) {
      const size_t rows = std::min(kChunkRows, input.rows - m0);
      for (size_t g = 0; g < groups; ++g) {
        std::memset(scratch.acc[g], 0, rows * kRowGroup * sizeof(float));
      }
      const size_t most = Tiles(rows).MaxBlocks();
      for (size_t b0 = 0; b0 < blocks; b0 += most) {
        const Region region = {m0, rows, b0, std::min(most, blocks - b0)};
        PrepareRows<Format>(input.quantized, cols, region, scratch.rows);
        for (size_t g = 0; g < groups; g += kTileGroups) {
          // Also past group_end: the next call is likely to go on there.
          const bool more =
              g0 + g + 2 * kTileGroups <= NumGroups(weights.rows);
          const size_t first = (g0 + g) * kRowGroup;
          TileGroups<Format>(
              weights.data + (g0 + g) * group_bytes,
              std::min(kTileGroups, groups - g), cols, input.quantized,
              region, m0 == 0 && more, scratch, &scratch.acc[g][0][0],
              {out + m0 * out_stride + first, out_stride,
               weights.rows - first});
        }
      }
    }
  }
}

// sum += the squares of 4 adjacent weights, of which the zero point is off.
template <class Format>
HWY_INLINE VI32 AddSquares(VU8 weights, VI32 sum) {
  const hn::Repartition<int16_t, DU8> d16;
  const auto zero = hn::Set(DU8(), static_cast<uint8_t>(Format::kZeroPoint));
  const auto pairs = hn::BitCast(d16, hn::Sub(weights, zero));
  const auto even = hn::ShiftRight<8>(hn::ShiftLeft<8>(pairs));
  const auto odd = hn::ShiftRight<8>(pairs);
  sum = hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), even, even));
  return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), odd, odd));
}

// sum += 4 adjacent weights.
HWY_INLINE VI32 AddWeights(VU8 weights, VI32 sum) {
  const hn::Repartition<int16_t, DU8> d16;
  const auto pairs = hn::BitCast(d16, weights);
  const auto two = hn::Add(hn::And(pairs, hn::Set(d16, 0xFF)),
                           hn::BitCast(d16, hn::ShiftRight<8>(hn::BitCast(
                               hn::RebindToUnsigned<decltype(d16)>(), pairs))));
  return hn::Add(sum, hn::WidenMulPairwiseAdd(DI32(), two,
                                              hn::Set(d16, int16_t{1})));
}

// Squares of the weights of a block's column, added to `sum`.
template <class Format>
HWY_INLINE VF32 AddBlockSquares(const uint8_t* data, const float* planes,
                                VF32 sum) {
  const DF32 df;
  constexpr size_t kCount = kQuads / Format::kParts;
  Unroll<Format::kParts>([&](auto part) GKV_INLINE_ATTR {
    VI32 squares = hn::Zero(DI32());
    [[maybe_unused]] VI32 weights = hn::Zero(DI32());
    Unroll<kCount>([&](auto i) GKV_INLINE_ATTR {
      const VU8 quad = Format::template Quad<part * kCount + i>(data);
      squares = AddSquares<Format>(quad, squares);
      if constexpr (Format::kHasMin) weights = AddWeights(quad, weights);
    });
    const VF32 scale = hn::LoadU(df, planes + part * kRowGroup);
    const VF32 scaled = hn::Mul(hn::Mul(scale, scale),
                                hn::ConvertTo(df, squares));
    if constexpr (Format::kHasMin) {
      // (scale * q + min)^2 = scaled + 2 * scale * min * q + min^2, of which
      // the middle is no more than the others: so much is lost at most.
      const VF32 min = hn::LoadU(df, planes + Format::kParts * kRowGroup);
      const VF32 mins = hn::Mul(hn::Mul(min, min),
                                hn::Set(df, float{kQuadBlock}));
      const VF32 twice = hn::Mul(hn::Mul(scale, min), hn::Set(df, 2.0f));
      const VF32 ends = hn::Add(scaled, mins);
      sum = hn::Add(sum, hn::MulAdd(twice, hn::ConvertTo(df, weights), ends));
      sum = hn::MulAdd(ends, hn::Set(df, 1e-6f), sum);
    } else {
      sum = hn::Add(sum, scaled);
    }
  });
  return sum;
}

// The kernel of weights of Format (quad_formats-inl.h).
template <class Format>
struct QuantizedKernel {
  static constexpr bool kQuantizedActivations = true;
  using Layout = GroupLayout<Format>;
  // A source block is so many of ours.
  static constexpr size_t kBlocks = Info(Format::kType).values / kQuadBlock;

  static void PackGroup(const uint8_t* source, size_t rows, size_t cols,
                        uint8_t* group) {
    static constexpr uint8_t kAbsent[256] = {};
    const size_t source_bytes = Info(Format::kType).bytes;
    const size_t count = cols / kQuadBlock / kBlocks;
    for (size_t i = 0; i < count; ++i) {
      const size_t first = i * kBlocks;
      uint8_t* scales = group + Layout::Scales(first) +
                        first % Format::kUnitBlocks / kBlocks *
                            Format::kScaleBytes;
      uint8_t* data = group + Layout::Data(first, count * kBlocks);
      for (size_t row = 0; row < kRowGroup; ++row) {
        const uint8_t* bytes =
            row < rows ? source + (row * count + i) * source_bytes : kAbsent;
        Format::PackScales(bytes, row, scales);
        for (size_t block = 0; block < kBlocks; ++block) {
          Format::PackBlock(bytes, block, row,
                            data + block * Format::kDataBytes);
        }
      }
    }
  }

  static void UnpackRow(const uint8_t* group, size_t row, size_t cols,
                        float* out) {
    const size_t blocks = cols / kQuadBlock;
    for (size_t i = 0; i < cols; ++i) {
      const size_t block = i / kQuadBlock;
      const uint8_t* scales = group + Layout::Scales(block) +
                              block % Format::kUnitBlocks / kBlocks *
                                  Format::kScaleBytes;
      const uint8_t* data = group + Layout::Data(block, blocks);
      out[i] = Format::Value(scales, i % (kBlocks * kQuadBlock), row,
                             Format::LevelAt(data, row, i % kQuadBlock));
    }
  }

  static void SquaredNorms(const uint8_t* group, size_t cols, float* out) {
    const DF32 df;
    const size_t blocks = cols / kQuadBlock;
    HWY_ALIGN float planes[Layout::kUnit][kPlanes<Format>][kRowGroup];
    HWY_ALIGN float sums[kRowGroup] = {};
    for (size_t first = 0; first < blocks; first += Layout::kUnit) {
      const size_t count = std::min(Layout::kUnit, blocks - first);
      Format::DecodeScales(group + Layout::Scales(first), 0, count,
                           &planes[0][0][0]);
      for (size_t s = 0; s < kRowGroup; s += kLanes) {
        const uint8_t* data =
            group + Layout::Data(first, blocks) + s * sizeof(float);
        VF32 sum = hn::LoadU(df, sums + s);
        for (size_t b = 0; b < count; ++b, data += Format::kDataBytes) {
          sum = AddBlockSquares<Format>(data, &planes[b][0][s], sum);
        }
        hn::StoreU(sum, df, sums + s);
      }
    }
    for (size_t s = 0; s < kRowGroup; s += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(df, sums + s), hn::Set(df, kNormSlack)), df,
                 out + s);
    }
  }

  static void MatMul(const MatMulTask& task) {
    if (task.input.rows == 0) return;
    if (task.input.rows <= kStreamRows) {
      MatMulFewRows<Format>(task);
    } else {
      MatMulManyRows<Format>(task);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_INL_H_
