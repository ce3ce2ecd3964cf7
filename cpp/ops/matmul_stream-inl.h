// The products of few rows with a type of quantized weights, and its packing:
// matmul_type.cc compiles them for each type. Included once per Highway target.

#if defined(GEMMAKV_OPS_MATMUL_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_MATMUL_STREAM_INL_H_
#undef GEMMAKV_OPS_MATMUL_STREAM_INL_H_
#else
#define GEMMAKV_OPS_MATMUL_STREAM_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/rounding.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/matmul_block-inl.h"
#include "ops/quad_formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// With few rows the processor has little to do for a weight, so the time of
// reading counts. Groups are read from end to end, each once, as streams that
// the processor reads ahead of by itself: the streams of a tile are far from
// each other, and each goes on for long. (One row of Q4_0, 12288 x 1536 and
// 1536 x 6144 from memory, two threads, where bare reading makes 49 GB/s: 41
// GB/s; with neighbouring groups 28, with two that prefetch 22.) Sums stay in
// registers until a group is done.

inline constexpr size_t kWideRows = 2;
inline constexpr size_t kWideColumns = kSlices == 1 ? 4 : kTileColumns;
// Columns of a tile of `rows` rows: each weight is unpacked once.
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

// Of so many blocks the rows are laid out at once: whole units of every format.
inline constexpr size_t kStreamBlocks = 4096 / kTileHeight;

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

// --- Streams ----------------------------------------------------------------

// A format whose weights are kept in a panel as they are unpacked.
template <class Format>
struct Kept : Format {
  struct At {
    At& operator+=(size_t bytes) {
      data += bytes;
      kept += kPanelBlockBytes;
      return *this;
    }
    const uint8_t* data;
    uint8_t* kept;
  };

  template <size_t kQuad>
  static HWY_INLINE VU8 Quad(const At& at) {
    const VU8 weights = Format::template Quad<kQuad>(at.data);
    hn::StoreU(weights, DU8(), at.kept + kQuad * kVectorBytes);
    return weights;
  }
};

// A column of the products of a tile.
struct StreamColumn {
  const uint8_t* group;
  size_t slice;  // of the group
  float* out;    // of the first row
  size_t lanes;  // that are rows of weights
};

// A stretch of the rows: blocks [first, first + count). Those of a second tile
// come after those of the first.
template <class Dot, class Format>
struct StreamInput {
  const RowBlockOf<Dot, Format>* blocks;
  size_t first, count;
};

// out[m * stride + lane] = the products of the input's blocks, after what is
// there if these are not a row's first. With a panel, weights and scales of the
// stretch, which is of one group then, are kept there.
template <class Dot, class Format, size_t kCols, size_t kRows,
          class PanelOrNone = std::nullptr_t>
void Stream(const StreamColumn (&columns)[kWideColumns],
            const StreamInput<Dot, Format>& input, size_t out_stride,
            PanelOrNone panel = nullptr) {
  constexpr bool kKeep = !std::is_null_pointer_v<PanelOrNone>;
  using Source = std::conditional_t<kKeep, Kept<Format>, Format>;
  using Layout = GroupLayout<Format>;
  constexpr size_t kUnit = Layout::kUnit;
  constexpr size_t kGroups = kSlices == 1 ? kCols : 1;
  // Where the products take longer than reading (cycles for a row and block,
  // bytes of the block), the processor does not read far enough ahead.
  constexpr size_t kCycles =
      kQuads + 2 * Format::kLevels.parts + Format::kLevels.has_min;
  constexpr bool kPrefetch =
      !kKeep && 8 * kRows * kCycles * kUnit >= Layout::kUnitBytes;
  constexpr size_t kAhead = kUnitsAhead * Layout::kUnitBytes;
  constexpr size_t kBlockPlanes = Planes(Format::kLevels) * kRowGroup;
  // From column to column.
  constexpr size_t kStep = kSlices == 1 ? kUnit * kBlockPlanes : kLanes;
  HWY_ALIGN float own[kKeep ? 1 : kGroups * kUnit * kBlockPlanes];
  float* planes = own;
  if constexpr (kKeep) planes = panel->planes;
  const DF32 df;
  // Rows beyond the first tile are a second one.
  constexpr size_t kFirst = kRows > kTileHeight ? kRows / 2 : kRows;
  constexpr size_t kOthers = kRows - kFirst;
  VF32 acc[kCols][kFirst];
  [[maybe_unused]] VF32 others[kCols][kOthers == 0 ? 1 : kOthers];
  const auto sum = [&](auto c, auto m) GKV_INLINE_ATTR -> VF32& {
    if constexpr (m < kFirst) {
      return acc[c][m];
    } else {
      return others[c][m - kFirst];
    }
  };
  Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      sum(c, m) = input.first == 0
                      ? hn::Zero(df)
                      : LoadUpTo(columns[c].out + m * out_stride,
                                 columns[c].lanes);
    });
  });
  const size_t skipped = Layout::Scales(input.first);
  const uint8_t* units[kGroups];
  for (size_t g = 0; g < kGroups; ++g) units[g] = columns[g].group + skipped;
  const auto* block = input.blocks;
  for (size_t left = input.count; left != 0;) {
    const size_t count = std::min(kUnit, left);
    left -= count;
    for (size_t g = 0; g < kGroups; ++g) {
      Format::DecodeScales(units[g], count, planes + g * kUnit * kBlockPlanes);
      if constexpr (kPrefetch) {
        for (size_t i = 0; i < ScaleBytes<Format>(kUnit); i += kVectorBytes) {
          hwy::Prefetch(units[g] + kAhead + i);
        }
      }
    }
    std::conditional_t<kKeep, typename Kept<Format>::At, const uint8_t*>
        data[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      const size_t slice = columns[c].slice * kLanes * sizeof(float);
      const uint8_t* at =
          units[c % kGroups] + ScaleBytes<Format>(count) + slice;
      if constexpr (kKeep) {
        data[c] = {at, panel->weights + slice +
                           (block - input.blocks) * kPanelBlockBytes};
      } else {
        data[c] = at;
      }
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
      AddBlock<Dot, Source>(data, *block, plane, kStep, acc);
      if constexpr (kOthers != 0) {
        Unroll<kCols>([&](auto c) GKV_INLINE_ATTR { ReadAgain(data[c]); });
        AddBlock<Dot, Source>(data, block[input.count], plane, kStep, others);
      }
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        data[c] += Format::kDataBytes;
      });
      plane += kBlockPlanes;
    }
    for (size_t g = 0; g < kGroups; ++g) units[g] += Layout::kUnitBytes;
    if constexpr (kKeep) planes += kUnit * kBlockPlanes;
  }
  Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      StoreUpTo(sum(c, m), columns[c].out + m * out_stride, columns[c].lanes);
    });
  });
}

// Column `c` of a task's groups `spread` apart, `first` being the first.
template <class Format>
StreamColumn ColumnAt(const MatMulTask& task, size_t first, size_t spread,
                      size_t c) {
  const PackedView& weights = task.weights;
  const size_t group = first + c / kSlices * spread;
  const size_t slice = c % kSlices;
  const size_t lane = group * kRowGroup + slice * kLanes;
  return {weights.data + group * GroupBytes(Format::kType, weights.cols), slice,
          task.out + lane,
          weights.rows <= lane ? 0 : std::min(kLanes, weights.rows - lane)};
}

// The stretch's products of `groups` (1..StreamGroups) groups of weights,
// `spread` groups apart.
template <class Dot, class Format>
void StreamGroupsOf(const MatMulTask& task, size_t first, size_t groups,
                    size_t spread, const StreamInput<Dot, Format>& input) {
  const size_t rows = task.input.rows;
  size_t c = 0;
  const auto go_on = [&](auto width, auto most_rows) {
    for (; c + width <= groups * kSlices; c += width) {
      StreamColumn at[kWideColumns];
      for (size_t i = 0; i < width; ++i) {
        at[i] = ColumnAt<Format>(task, first, spread, c + i);
      }
      Unroll<most_rows>([&](auto m) HWY_ATTR {
        if (rows == m + 1) {
          Stream<Dot, Format, width, m + 1>(at, input, task.out_stride);
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
  constexpr size_t kMost = kSlices == 1 ? kTileRows : kStreamRows<Dot, Format>;
  if (rows <= kMost) {
    go_on(std::integral_constant<size_t, kTileColumns>(),
          std::integral_constant<size_t, kMost>());
  }
  // Slices are whole columns of each width.
  if constexpr (kSlices == 1) {
    go_on(std::integral_constant<size_t, 1>(),
          std::integral_constant<size_t, kTileHeight>());
  }
}

// --- Norms ------------------------------------------------------------------

// sum += the squares of 4 adjacent weights, of which the zero point is off.
template <class Format>
HWY_INLINE VI32 AddSquares(VU8 weights, VI32 sum) {
  const hn::Repartition<int16_t, DU8> d16;
  const auto zero =
      hn::Set(DU8(), static_cast<uint8_t>(Format::kLevels.zero_point));
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
  constexpr size_t kParts = Format::kLevels.parts;
  constexpr size_t kCount = kQuads / kParts;
  Unroll<kParts>([&](auto part) GKV_INLINE_ATTR {
    VI32 squares = hn::Zero(DI32());
    [[maybe_unused]] VI32 weights = hn::Zero(DI32());
    Unroll<kCount>([&](auto i) GKV_INLINE_ATTR {
      const VU8 quad = Format::template Quad<part * kCount + i>(data);
      squares = AddSquares<Format>(quad, squares);
      if constexpr (Format::kLevels.has_min) {
        weights = AddWeights(quad, weights);
      }
    });
    const VF32 scale = hn::LoadU(df, planes + part * kRowGroup);
    const VF32 scaled = hn::Mul(hn::Mul(scale, scale),
                                hn::ConvertTo(df, squares));
    if constexpr (Format::kLevels.has_min) {
      // (scale * q + min)^2 = scaled + 2 * scale * min * q + min^2, of which
      // the middle is no more than the others: so much is lost at most.
      const VF32 min = hn::LoadU(df, planes + kParts * kRowGroup);
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
  static constexpr Levels kLevels = Format::kLevels;
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
    HWY_ALIGN float planes[Layout::kUnit][Planes(kLevels)][kRowGroup];
    HWY_ALIGN float sums[kRowGroup] = {};
    for (size_t first = 0; first < blocks; first += Layout::kUnit) {
      const size_t count = std::min(Layout::kUnit, blocks - first);
      Format::DecodeScales(group + Layout::Scales(first), count,
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

  // The products of at most kStreamRows rows.
  static void MatMul(const MatMulTask& task) {
    WithCurrentDot([&](auto dot) HWY_ATTR { Products<decltype(dot)>(task); });
  }

  // The first tile of several.
  static void FirstTile(const TilePass& pass, Panel& panel) {
    WithCurrentDot([&](auto dot) HWY_ATTR {
      Pass<decltype(dot)>(pass, panel);
    });
  }

 private:
  template <class Dot>
  static void Products(const MatMulTask& task) {
    using Rows = RowBlockOf<Dot, Format>[kStreamBlocks];
    static_assert(sizeof(Rows) <= kMatMulScratchBytes);
    const size_t rows = task.input.rows;
    if (rows == 0) return;
    const size_t all = task.weights.cols / kQuadBlock;
    auto* const blocks = *reinterpret_cast<Rows*>(task.scratch);
    // Each of the places that are read at once is a stretch of its own.
    const size_t at_once = StreamGroups(rows);
    const size_t stretch = (task.group_end - task.group_begin) / at_once;
    const size_t rest = task.group_begin + stretch * at_once;
    const TileCut cut(rows);
    const size_t most = kStreamBlocks / cut.tiles;
    for (size_t b = 0; b < all; b += most) {
      const StreamInput<Dot, Format> input = {blocks, b,
                                              std::min(most, all - b)};
      for (size_t t = 0; t < cut.tiles; ++t) {
        LayOutTile<Dot, Format>(task.input.quantized, kLevels.zero_point, all,
                                cut.Begin(t), cut.Height(t), b, input.count,
                                blocks + t * input.count);
      }
      for (size_t g = 0; g < stretch; ++g) {
        StreamGroupsOf<Dot>(task, task.group_begin + g, at_once, stretch,
                            input);
      }
      if (rest < task.group_end) {
        StreamGroupsOf<Dot>(task, rest, task.group_end - rest, 1, input);
      }
    }
  }

  template <class Dot>
  static void Pass(const TilePass& pass, Panel& panel) {
    constexpr size_t kCols = std::min(kSlices, kTileColumns);
    const StreamInput<Dot, Format> input = {
        static_cast<const RowBlockOf<Dot, Format>*>(pass.rows), pass.first,
        pass.blocks};
    for (size_t s = 0; s < kSlices; s += kCols) {
      StreamColumn at[kWideColumns];
      for (size_t c = 0; c < kCols; ++c) {
        const size_t lane = (s + c) * kLanes;
        at[c] = {pass.group, s + c, pass.out + lane,
                 pass.lanes <= lane ? 0 : std::min(kLanes, pass.lanes - lane)};
      }
      Unroll<kTileHeight - kLeastHeight + 1>([&](auto m) HWY_ATTR {
        if (pass.height != kLeastHeight + m) return;
        Stream<Dot, Format, kCols, kLeastHeight + m>(at, input,
                                                     pass.out_stride, &panel);
      });
    }
  }
};

using KernelQ4_0 = QuantizedKernel<FormatQ4_0>;
using KernelQ5_0 = QuantizedKernel<FormatQ5_0>;
using KernelQ8_0 = QuantizedKernel<FormatQ8_0>;
using KernelQ4_K = QuantizedKernel<FormatQ4_K>;
using KernelQ5_K = QuantizedKernel<FormatQ5_K>;
using KernelQ6_K = QuantizedKernel<FormatQ6_K>;

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_STREAM_INL_H_
