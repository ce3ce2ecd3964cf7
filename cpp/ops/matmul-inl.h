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
#include "ops/byte_dot-inl.h"
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
// Few rows, at most kTileHeight, are one tile: the processor has little to do
// for a weight, so reading is what counts. Groups are read from end to end, each
// once, as streams that the processor reads ahead of by itself: those of a tile
// are far from each other, each the next of a long stretch. (One row of Q4_0,
// 12288 x 1536 and 1536 x 6144 from memory, two threads, GB/s where bare reading
// makes 49: 41, of neighbouring groups 28, of two that prefetch 22.) Sums stay
// in registers until a group is done.
//
// More rows are several such tiles, which pass a group while it is in L1.

// With up to 8 rows, one column of a tile's sums fits the registers of AVX-512:
// each weight is unpacked once.
inline constexpr size_t kTileHeight = kSlices == 1 ? 8 : kTileRows;
inline constexpr size_t kWideRows = 2;
inline constexpr size_t kWideColumns = kSlices == 1 ? 4 : kTileColumns;
// Columns of a lone tile of `rows` rows.
constexpr size_t StreamColumns(size_t rows) {
  return rows <= kWideRows   ? kWideColumns
         : rows <= kTileRows ? kTileColumns
                             : 1;
}
constexpr size_t StreamGroups(size_t rows) {
  return std::max<size_t>(1, StreamColumns(rows) / kSlices);
}
// How far ahead streams are prefetched, in units.
inline constexpr size_t kUnitsAhead = 2;

// So many tiles, a step's 128 rows of a prompt, pass a group at once. Of them 32
// blocks are laid out, of fewer more: they stay in L2.
inline constexpr size_t kChunkTiles = 128 / kTileHeight;
inline constexpr size_t kTileBlocks = kChunkTiles * 32;
// Blocks that are whole units of every format.
inline constexpr size_t kWholeUnits = 16;
// The next group is prefetched while so many tiles pass this one.
inline constexpr size_t kPrefetchTiles = 2;

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

// A format whose products of bytes are summed by an instruction that is not
// Highway's for the target.
template <class Format, ByteDot kDot>
struct WithByteDot : Format {};

// The instruction of a format, and the format without it.
template <class Format>
struct ByteDotOf {
  using Plain = Format;
  static constexpr ByteDot kDot = ByteDot::kOfTarget;
};
template <class Format, ByteDot kOther>
struct ByteDotOf<WithByteDot<Format, kOther>> {
  using Plain = Format;
  static constexpr ByteDot kDot = kOther;
};
template <class Format>
using PlainOf = typename ByteDotOf<Format>::Plain;

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
template <class Format>
inline constexpr bool kSaturatingDot =
    HWY_ARCH_X86 && HWY_TARGET > HWY_AVX3_DL && HWY_TARGET <= HWY_SSSE3 &&
    ByteDotOf<Format>::kDot == ByteDot::kOfTarget;
template <class Format>
inline constexpr bool kSignedDot =
    kSaturatingDot<Format> && Format::kZeroPoint == 128;

using DI16 = hn::Repartition<int16_t, DU8>;
using VI16 = hn::Vec<DI16>;

// How many quads of a part may be summed in 16 bits: 8 of Q4_0, 1 of Q8_0.
template <class Format>
constexpr size_t PairSums() {
  if (!kSaturatingDot<Format> || kSignedDot<Format>) return 1;
  constexpr size_t kBits = Format::kDataBytes / kVectorBytes;
  constexpr size_t kMost = 2 * ((1 << kBits) - 1) * 128;  // of one pair
  return std::min(kQuads / Format::kParts, size_t{32767} / kMost);
}

// sum + the products of 4 adjacent weights and activations. Exact.
template <class Format>
HWY_INLINE VI32 AddQuad(VU8 weights, hn::Vec<DI8> x, VI32 sum) {
  return AddByteDot<ByteDotOf<Format>::kDot>(weights, x, sum);
}

// The same, the first two products and the last two for themselves; `first`:
// `sum` counts as 0. Requires: kSaturatingDot<Format>.
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
  // One value alone would wait for each of its sums, two of short vectors too.
  constexpr bool kTwoSums =
      !kSaturatingDot<Format> && kCols * kRows <= (kHasByteDots ? 2 : 1);
  [[maybe_unused]] VI32 odd[kCols][kRows];
  if constexpr (kTwoSums) {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
        odd[c][m] = hn::Zero(DI32());
      });
    });
  }
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
          odd[c][m] = AddQuad<Format>(weights[c], broadcast, odd[c][m]);
        } else if constexpr (!kSaturatingDot<Format>) {
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
  if constexpr (kTwoSums) {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
        dot[c][m] = hn::Add(dot[c][m], odd[c][m]);
      });
    });
  }
}

// acc[c][m] += the products of a block. `values` are the rows' in this block,
// `planes` the scales of column 0, those of the next `plane_step` further.
template <class Format, size_t kCols, size_t kRows, size_t kFactorRows>
HWY_INLINE void AddBlock(
    const uint8_t* const (&data)[kCols], const int8_t* const (&values)[kRows],
    const BlockFactors<PlainOf<Format>, kFactorRows>& factors,
    const float* planes, size_t plane_step, VF32 (&acc)[kCols][kRows]) {
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

// --- Rows -------------------------------------------------------------------

// All that a block's products need of a tile's rows, side by side: rows far
// apart would share sets of L1 (6,144 columns: 1.3 times the time of 8 rows) and
// take a register each for their addresses.
template <class Format>
struct RowBlock {
  BlockFactors<Format, kTileHeight> factors;
  int8_t values[kTileHeight][kQuadBlock];
};
template <class Format>
using RowBlockOf = RowBlock<PlainOf<Format>>;

// Rows cut into tiles of nearly equal height.
struct TileCut {
  explicit TileCut(size_t rows)
      : rows(rows), tiles(CeilDiv(rows, kTileHeight)) {}

  // The first row of a tile.
  size_t Begin(size_t tile) const { return rows * tile / tiles; }
  size_t Height(size_t tile) const { return Begin(tile + 1) - Begin(tile); }

  size_t rows, tiles;
};

// Blocks [first, first + count) of `height` rows from row `top` of the input on,
// `all` being those of a row.
template <class Format>
void LayOutTile(const QuantizedRows& input, size_t all, size_t top,
                size_t height, size_t first, size_t count,
                RowBlock<Format>* out) {
  for (size_t m = 0; m < height; ++m) {
    for (size_t b = 0; b < count; ++b) {
      const size_t at = (top + m) * all + first + b;
      SetFactors<Format>(input, at, m, out[b].factors);
      hwy::CopyBytes<kQuadBlock>(input.values + at * kQuadBlock,
                                 out[b].values[m]);
    }
  }
}

// A stretch of the columns of a chunk of rows: blocks [first, first + count).
template <class Format>
struct TiledRows {
  const RowBlockOf<Format>* blocks;  // [tiles][stride], from `first` on
  size_t stride;
  size_t first, count;
};

// --- Streams ----------------------------------------------------------------

// A column of the products of a tile.
struct StreamColumn {
  const uint8_t* group;
  size_t slice;  // of the group
  float* out;    // of the tile's first row
  size_t lanes;  // that are rows of weights
};

// A tile's rows in a stretch.
template <class Format>
struct StreamInput {
  const RowBlockOf<Format>* blocks;
  size_t first, count;
};

// What is to be done about a group's scales, which are decoded to floats
// [blocks][kPlanes][kRowGroup].
enum class Scales {
  kDecode,  // for this tile alone
  kKeep,    // for the tiles that follow, too
  kReuse    // an earlier tile has kept them
};

// Where they are kept, and what to prefetch meanwhile: so many bytes a block,
// null if nothing.
struct KeptScales {
  float* planes;
  const uint8_t* ahead;
  size_t ahead_step;
};

// out[m * stride + lane] = the products of the input's blocks, behind what is
// there if these are not a row's first.
template <class Format, Scales kScales, size_t kCols, size_t kRows>
void Stream(const StreamColumn (&columns)[kWideColumns],
            const StreamInput<Format>& input, const KeptScales& kept,
            size_t out_stride) {
  using Layout = GroupLayout<Format>;
  constexpr size_t kUnit = Layout::kUnit;
  constexpr size_t kGroups = kSlices == 1 ? kCols : 1;
  static_assert(kScales == Scales::kDecode || kGroups == 1);
  // Where the products take longer than reading (cycles for a row and block,
  // bytes of the block), the processor does not read far enough ahead.
  constexpr size_t kCycles = kQuads + 2 * Format::kParts + Format::kHasMin;
  constexpr bool kPrefetch = kScales == Scales::kDecode &&
                             8 * kRows * kCycles * kUnit >= Layout::kUnitBytes;
  constexpr size_t kAhead = kUnitsAhead * Layout::kUnitBytes;
  constexpr size_t kStep = PlaneStep<Format>(kUnit);
  constexpr size_t kBlockPlanes = kPlanes<Format> * kRowGroup;
  HWY_ALIGN float own[kScales == Scales::kDecode ? kGroups * kUnit * kBlockPlanes
                                                 : 1];
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
  const RowBlockOf<Format>* block = input.blocks;
  float* planes = kScales == Scales::kDecode ? own : kept.planes;
  const uint8_t* ahead = kept.ahead;
  for (size_t left = input.count; left != 0;) {
    const size_t count = std::min(kUnit, left);
    left -= count;
    if constexpr (kScales != Scales::kReuse) {
      for (size_t g = 0; g < kGroups; ++g) {
        Format::DecodeScales(units[g], 0, count,
                             planes + g * kUnit * kBlockPlanes);
        if constexpr (kPrefetch) {
          for (size_t i = 0; i < ScaleBytes<Format>(kUnit); i += kVectorBytes) {
            hwy::Prefetch(units[g] + kAhead + i);
          }
        }
      }
    }
    const uint8_t* data[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      data[c] = units[c % kGroups] + ScaleBytes<Format>(count) +
                columns[c].slice * kLanes * sizeof(float);
    });
    const float* plane = planes + columns[0].slice * kLanes;
    for (size_t b = 0; b < count; ++b, ++block) {
      if constexpr (kPrefetch) {
        // Not Unroll: GCC takes a lambda that only prefetches for a no-op.
        for (size_t c = 0; c < kGroups; ++c) {
          for (size_t i = 0; i < Format::kDataBytes; i += kVectorBytes) {
            hwy::Prefetch(data[c] + kAhead + i);
          }
        }
      }
      if constexpr (kScales == Scales::kReuse) {
        if (ahead != nullptr) {
          for (size_t i = 0; i < kept.ahead_step; i += kVectorBytes) {
            hwy::Prefetch(ahead + i);
          }
          ahead += kept.ahead_step;
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
      plane += kBlockPlanes;
    }
    for (size_t g = 0; g < kGroups; ++g) units[g] += Layout::kUnitBytes;
    if constexpr (kScales != Scales::kDecode) planes += kUnit * kBlockPlanes;
  }
  Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      StoreUpTo(acc[c][m], columns[c].out + m * out_stride, columns[c].lanes);
    });
  });
}

// Column `c` of a task's groups `spread` apart, `first` being the first.
// `row` is that of the tile's first row.
template <class Format>
StreamColumn ColumnAt(const MatMulTask& task, size_t first, size_t spread,
                      size_t c, size_t row) {
  const PackedView& weights = task.weights;
  const size_t group = first + c / kSlices * spread;
  const size_t slice = c % kSlices;
  const size_t lane = group * kRowGroup + slice * kLanes;
  return {weights.data + group * GroupBytes(Format::kType, weights.cols), slice,
          task.out + row * task.out_stride + lane,
          weights.rows <= lane ? 0 : std::min(kLanes, weights.rows - lane)};
}

// `groups` (1..StreamGroups) groups of weights, `spread` groups apart, with the
// only tile of `rows` rows.
template <class Format>
void LoneTile(const MatMulTask& task, size_t first, size_t groups,
              size_t spread, size_t rows, const StreamInput<Format>& input) {
  size_t c = 0;
  const auto go_on = [&](auto width, auto most_rows) {
    for (; c + width <= groups * kSlices; c += width) {
      StreamColumn at[kWideColumns];
      for (size_t i = 0; i < width; ++i) {
        at[i] = ColumnAt<Format>(task, first, spread, c + i, 0);
      }
      Unroll<most_rows>([&](auto m) HWY_ATTR {
        if (rows == m + 1) {
          Stream<Format, Scales::kDecode, width, m + 1>(at, input, {},
                                                        task.out_stride);
        }
      });
    }
  };
  if constexpr (kWideColumns > kTileColumns) {
    if (rows <= kWideRows) {
      go_on(std::integral_constant<size_t, kWideColumns>(),
            std::integral_constant<size_t, kWideRows>());
    }
  }
  if (rows <= kTileRows) {
    go_on(std::integral_constant<size_t, kTileColumns>(),
          std::integral_constant<size_t, kTileRows>());
  }
  go_on(std::integral_constant<size_t, 1>(),
        std::integral_constant<size_t, kTileHeight>());
}

// How many blocks of `tiles` tiles are laid out at once.
constexpr size_t BlocksAtOnce(size_t tiles, size_t all) {
  return std::min(all, kTileBlocks / tiles / kWholeUnits * kWholeUnits);
}

// A task's scratch: a stretch of its rows, laid out, and the scales of a group
// for half as many blocks.
template <class Format>
struct MatMulScratch {
  alignas(64) RowBlockOf<Format> blocks[kTileBlocks];
  alignas(64) float planes[kTileBlocks / 2 * kPlanes<Format> * kRowGroup];
};

// The products of 1 to kTileHeight rows.
template <class Format>
void MatMulFewRows(const MatMulTask& task) {
  const size_t rows = task.input.rows;
  const size_t all = task.weights.cols / kQuadBlock;
  RowBlockOf<Format>* const blocks =
      reinterpret_cast<MatMulScratch<Format>*>(task.scratch)->blocks;
  // Each of the places that are read at once is a stretch of its own.
  const size_t at_once = StreamGroups(rows);
  const size_t stretch = (task.group_end - task.group_begin) / at_once;
  const size_t rest = task.group_begin + stretch * at_once;
  const size_t most = BlocksAtOnce(1, all);
  for (size_t b = 0; b < all; b += most) {
    const StreamInput<Format> input = {blocks, b, std::min(most, all - b)};
    LayOutTile(task.input.quantized, all, 0, rows, b, input.count, blocks);
    for (size_t g = 0; g < stretch; ++g) {
      LoneTile(task, task.group_begin + g, at_once, stretch, rows, input);
    }
    if (rest < task.group_end) {
      LoneTile(task, rest, task.group_end - rest, 1, rows, input);
    }
  }
}

// One group with tiles [first, first + count) of a stretch. The group's weights
// stay in L1 meanwhile. `more`: another group follows, which is prefetched.
template <class Format>
void AllTiles(const MatMulTask& task, size_t group, const TileCut& cut,
              size_t first, size_t count, const TiledRows<Format>& rows,
              bool more, float* planes) {
  using Layout = GroupLayout<Format>;
  // The least that a tile of several can have.
  constexpr size_t kLeast = (kTileHeight + 1) / 2;
  constexpr size_t kCols = std::min(kSlices, kTileColumns);
  const size_t group_bytes = GroupBytes(Format::kType, task.weights.cols);
  const size_t begin = Layout::Scales(rows.first);
  const size_t bytes =
      std::min(group_bytes, Layout::Scales(rows.first + rows.count +
                                           Layout::kUnit - 1)) - begin;
  // Some tiles behind the first prefetch a share each.
  const size_t shares = more ? std::min(count - 1, kPrefetchTiles) : 0;
  const size_t step =
      shares == 0
          ? 0
          : RoundUp(CeilDiv(bytes, shares * rows.count), kVectorBytes);
  for (size_t t = 0; t < count; ++t) {
    const size_t row = cut.Begin(first + t), height = cut.Height(first + t);
    const StreamInput<Format> input = {rows.blocks + t * rows.stride,
                                       rows.first, rows.count};
    for (size_t c = 0; c < kSlices; c += kCols) {
      StreamColumn at[kWideColumns];
      for (size_t i = 0; i < kCols; ++i) {
        at[i] = ColumnAt<Format>(task, group, 1, c + i, row);
      }
      KeptScales kept = {planes, nullptr, step};
      if (c == 0 && t != 0 && t <= shares) {
        kept.ahead = at[0].group + group_bytes + begin +
                     (t - 1) * rows.count * step;
      }
      Unroll<kTileHeight - kLeast + 1>([&](auto m) HWY_ATTR {
        if (height != kLeast + m) return;
        if (t == 0 && c == 0) {
          Stream<Format, Scales::kKeep, kCols, kLeast + m>(at, input, kept,
                                                           task.out_stride);
        } else {
          Stream<Format, Scales::kReuse, kCols, kLeast + m>(at, input, kept,
                                                            task.out_stride);
        }
      });
    }
  }
}

// The products of more than kTileHeight rows.
template <class Format>
void MatMulManyRows(const MatMulTask& task) {
  const MatMulInput& input = task.input;
  const size_t all = task.weights.cols / kQuadBlock;
  const auto* laid_out =
      reinterpret_cast<const RowBlockOf<Format>*>(input.laid_out);
  auto& scratch = *reinterpret_cast<MatMulScratch<Format>*>(task.scratch);
  RowBlockOf<Format>* const own = scratch.blocks;
  float* const planes = scratch.planes;
  const TileCut cut(input.rows);
  for (size_t first = 0; first < cut.tiles; first += kChunkTiles) {
    const size_t count = std::min(kChunkTiles, cut.tiles - first);
    // There are scales of half as many blocks.
    const size_t most = BlocksAtOnce(std::max<size_t>(2, count), all);
    for (size_t b = 0; b < all; b += most) {
      TiledRows<Format> rows = {own, most, b, std::min(most, all - b)};
      if (laid_out != nullptr) {
        rows.blocks = laid_out + first * all + b;
        rows.stride = all;
      } else {
        for (size_t t = 0; t < count; ++t) {
          LayOutTile(input.quantized, all, cut.Begin(first + t),
                     cut.Height(first + t), b, rows.count, own + t * most);
        }
      }
      for (size_t g = task.group_begin; g < task.group_end; ++g) {
        // Also past group_end: the next call is likely to go on there.
        const bool more = g + 1 < NumGroups(task.weights.rows);
        AllTiles(task, g, cut, first, count, rows, more, planes);
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

  static RowLayout LayoutOfRows(size_t rows, size_t cols) {
    if (rows <= kTileHeight) return {0, 0};
    const size_t tiles = TileCut(rows).tiles;
    return {tiles, tiles * (cols / kQuadBlock) * sizeof(RowBlockOf<Format>)};
  }

  static void LayOutRows(const MatMulInput& input, size_t cols, size_t tile,
                         uint8_t* out) {
    const size_t all = cols / kQuadBlock;
    const TileCut cut(input.rows);
    LayOutTile(input.quantized, all, cut.Begin(tile), cut.Height(tile), 0, all,
               reinterpret_cast<RowBlockOf<Format>*>(out) + tile * all);
  }

  static void MatMul(const MatMulTask& task) {
    WithCurrentByteDot([&](auto dot) HWY_ATTR {
      if constexpr (dot == ByteDot::kOfTarget) {
        Products<Format>(task);
      } else {
        Products<WithByteDot<Format, dot>>(task);
      }
    });
  }

 private:
  template <class OfDot>
  static void Products(const MatMulTask& task) {
    static_assert(sizeof(MatMulScratch<OfDot>) <= kMatMulScratchBytes);
    if (task.input.rows == 0) return;
    if (task.input.rows <= kTileHeight) {
      MatMulFewRows<OfDot>(task);
    } else {
      MatMulManyRows<OfDot>(task);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_INL_H_
