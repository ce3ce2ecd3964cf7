// The arithmetic of products of quantized weights with 8-bit activations, and
// how it reads the activations. Included once per Highway target.

#if defined(GEMMAKV_OPS_MATMUL_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_MATMUL_BLOCK_INL_H_
#undef GEMMAKV_OPS_MATMUL_BLOCK_INL_H_
#else
#define GEMMAKV_OPS_MATMUL_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/rounding.h"
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
//
// Weights come from a source, which is a format (quad_formats-inl.h) or a panel
// (matmul_panel.cc). It has
//   kLevels        Levels: what the stored numbers are
//   kDataBytes     of a block
//   Quad<q>(data)  the unsigned weights of quad q; `data` is where the slice is
// and their scales are floats [blocks][Planes(levels)][16]: those of the parts,
// then the negated minimum.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// With up to 8 rows, one column of a tile's sums fits the registers of AVX-512.
inline constexpr size_t kTileHeight = kSlices == 1 ? 8 : kTileRows;
// The least that a tile of several has.
inline constexpr size_t kLeastHeight = (kTileHeight + 1) / 2;

using DI16 = hn::Repartition<int16_t, DU8>;
using VI16 = hn::Vec<DI16>;

// --- Rows -------------------------------------------------------------------

// Where products are added in 16 bits, those of two bytes must fit: they do
// with weights of up to 7 bits. Weights of 8 bits, and the rows for them, are
// widened to 16 bits instead, and products are added in 32 bits.
template <class Dot, class Source>
inline constexpr bool kWidened = Dot::kPairs && Source::kLevels.bits == 8;
template <class Dot, class Source>
inline constexpr bool kAddsPairs = Dot::kPairs && !kWidened<Dot, Source>;

// All that a block's products need of a tile's rows, side by side: rows far
// apart would share sets of L1 (6,144 columns: 1.3 times the time of 8 rows),
// and take a register each for their addresses.
template <size_t kParts, bool kWide>
struct RowBlock {
  float scale[kTileHeight];
  union {
    // Where sums of products begin, which takes the zero point out of them:
    // -zero_point * sum for each part. Where products are added in 16 bits, the
    // lower half has it for the first two columns of all quads, the upper for
    // the last two.
    int32_t start[kParts][kTileHeight];
    float scaled_sum[kTileHeight];  // scale * sum, for types with a minimum
  };
  // Widened, the even columns come first, then the odd ones.
  std::conditional_t<kWide, int16_t[2][kQuadBlock / 2], int8_t[kQuadBlock]>
      values[kTileHeight];
};

// Rows as Dot reads them for weights of Source.
template <class Dot, class Source>
using RowBlockOf = RowBlock<Source::kLevels.parts, kWidened<Dot, Source>>;

// The most rows of which a stream passes each weight: two tiles of those whose
// weights cost little to unpack, as they are unpacked for each.
template <class Dot, class Source>
inline constexpr size_t kStreamRows =
    (kWidened<Dot, Source> && kSlices > 1 ? 2 : 1) * kTileHeight;

// Rows cut into tiles of nearly equal height.
struct TileCut {
  explicit TileCut(size_t rows)
      : rows(rows), tiles(CeilDiv(rows, kTileHeight)) {}

  // The first row of a tile.
  size_t Begin(size_t tile) const { return rows * tile / tiles; }
  size_t Height(size_t tile) const { return Begin(tile + 1) - Begin(tile); }

  size_t rows, tiles;
};

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

// RowBlock::start of kCount columns. For pairs, modulo 2^16.
template <class Dot, size_t kCount>
HWY_INLINE int32_t StartOf(const int8_t* values, int zero_point) {
  if constexpr (Dot::kPairs) {
    const hn::FixedTag<int8_t, 16> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    const hn::FixedTag<int16_t, 8> d16;
    const hn::FixedTag<int32_t, 4> d32;
    auto sums = hn::Zero(d16);
    for (size_t i = 0; i < kCount; i += 16) {
      sums = hn::Add(sums, hn::SatWidenMulPairwiseAdd(
                               d16, hn::Set(du, 1), hn::LoadU(d, values + i)));
    }
    sums = hn::Add(sums, hn::BitCast(d16, hn::Shuffle1032(
                             hn::BitCast(d32, sums))));
    sums = hn::Add(sums, hn::BitCast(d16, hn::Shuffle2301(
                             hn::BitCast(d32, sums))));
    sums = hn::Mul(sums, hn::Set(d16, static_cast<int16_t>(-zero_point)));
    return hn::GetLane(hn::BitCast(d32, sums));
  } else {
    int32_t sum = 0;
    for (size_t i = 0; i < kCount; i += 16) sum += SumOf16(values + i);
    return -zero_point * sum;
  }
}

// Writes the values of a block as 16 bits: the even columns, then the odd ones.
HWY_INLINE void WidenValues(const int8_t* HWY_RESTRICT values,
                            int16_t (&out)[2][kQuadBlock / 2]) {
  const hn::CappedTag<int16_t, kQuadBlock / 2> d16;
  const hn::Repartition<int8_t, decltype(d16)> d8;
  for (size_t i = 0; i < kQuadBlock / 2; i += hn::Lanes(d16)) {
    const auto pairs = hn::BitCast(d16, hn::LoadU(d8, values + 2 * i));
    hn::StoreU(hn::ShiftRight<8>(hn::ShiftLeft<8>(pairs)), d16, out[0] + i);
    hn::StoreU(hn::ShiftRight<8>(pairs), d16, out[1] + i);
  }
}

// Lays out blocks [first, first + count) of `height` rows from row `top` of the
// input on. A row has `all` blocks.
template <class Dot, class Source>
void LayOutTile(const QuantizedRows& input, int zero_point, size_t all,
                size_t top, size_t height, size_t first, size_t count,
                RowBlockOf<Dot, Source>* out) {
  constexpr size_t kParts = Source::kLevels.parts;
  constexpr size_t kPart = kQuadBlock / kParts;
  for (size_t m = 0; m < height; ++m) {
    for (size_t b = 0; b < count; ++b) {
      const size_t at = (top + m) * all + first + b;
      const int8_t* values = input.values + at * kQuadBlock;
      const float scale = input.scales[at];
      out[b].scale[m] = scale;
      if constexpr (Source::kLevels.has_min) {
        out[b].scaled_sum[m] = scale * static_cast<float>(input.sums[at]);
      } else if constexpr (kParts == 1 && !kAddsPairs<Dot, Source>) {
        out[b].start[0][m] = -zero_point * input.sums[at];
      } else {
        for (size_t part = 0; part < kParts; ++part) {
          out[b].start[part][m] =
              StartOf<Dot, kPart>(values + part * kPart, zero_point);
        }
      }
      if constexpr (kWidened<Dot, Source>) {
        WidenValues(values, out[b].values[m]);
      } else {
        hwy::CopyBytes<kQuadBlock>(values, out[b].values[m]);
      }
    }
  }
}

// --- Products ---------------------------------------------------------------

// How many quads of a part one sum takes. In 16 bits what begins with the zero
// point's share ends below 2^15 whatever it was in between, modulo 2^16: of 16
// weights of up to 5 bits, or 8 of 6 bits, less their zero point, with 127.
// Without a zero point all of 16 weights of 4 bits fit, 8 of 5 bits.
template <class Dot, class Source, size_t kOutputs>
constexpr size_t QuadsOfSum() {
  constexpr size_t kCount = kQuads / Source::kLevels.parts;
  constexpr bool kHalf = Source::kLevels.has_min && Source::kLevels.bits > 4;
  if (Dot::kPairs) return kHalf ? kCount / 2 : kCount;
  // One value alone would wait for each of its sums, two of short vectors too.
  return kOutputs <= (kLanes == 8 ? 2 : 1) ? kCount / 2 : kCount;
}

// Four bytes of a row in every lane.
template <class D>
HWY_INLINE hn::Vec<D> BroadcastFour(D d, const void* bytes) {
  int32_t four;
  std::memcpy(&four, bytes, sizeof(four));
  return hn::BitCast(d, hn::Set(DI32(), four));
}

// dot[c][m] = the products of part `kPart` of column c and row m.
template <class Dot, class Source, size_t kPart, class At, size_t kCols,
          size_t kRows>
HWY_INLINE void DotPart(const At (&data)[kCols],
                        const RowBlockOf<Dot, Source>& rows,
                        VI32 (&dot)[kCols][kRows]) {
  constexpr size_t kCount = kQuads / Source::kLevels.parts;
  constexpr size_t kSum = QuadsOfSum<Dot, Source, kCols * kRows>();
  constexpr bool kHasStart = !Source::kLevels.has_min;
  static_assert(kCount % kSum == 0);
  static_assert(!Dot::kPairs || !kHasStart || kSum == kCount);
  std::conditional_t<Dot::kPairs, VI16, VI32> sums[kCols][kRows];
  Unroll<kCount>([&](auto i) GKV_INLINE_ATTR {
    // Both nibbles of a vector, one after the other.
    constexpr size_t kQuad = kCount == kQuads
                                 ? i % 2 * (kQuads / 2) + i / 2
                                 : kPart * kCount + i;
    constexpr bool kFirst = i % kSum == 0;
    constexpr bool kStart = i == 0 && kHasStart;
    VU8 weights[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      weights[c] = Source::template Quad<kQuad>(data[c]);
    });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      const auto at_start = [&]() GKV_INLINE_ATTR {
        return hn::Set(DI32(), kStart ? rows.start[kPart][m] : 0);
      };
      const auto x = BroadcastFour(DI8(), rows.values[m] + 4 * kQuad);
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        auto& sum = sums[c][m];
        if constexpr (!Dot::kPairs) {
          if constexpr (kFirst) sum = at_start();
          sum = Dot::AddQuads(weights[c], x, sum);
        } else {
          if constexpr (kStart) sum = hn::BitCast(DI16(), at_start());
          const auto products = Dot::Pairs(weights[c], x);
          sum = kFirst && !kStart ? products : hn::Add(sum, products);
          KeepOrder(sum);
        }
        if constexpr (i % kSum == kSum - 1) {
          VI32 all;
          if constexpr (Dot::kPairs) {
            all = Dot::Join(sum);
          } else {
            all = sum;
          }
          dot[c][m] = i < kSum ? all : hn::Add(dot[c][m], all);
        }
      });
    });
  });
}

// The same of weights and rows that are widened. A vector of weights, whose
// pairs of columns are 16 bits wide, is its even columns and its odd ones.
template <class Dot, class Source, class At, size_t kCols, size_t kRows>
HWY_INLINE void DotWidened(const At (&data)[kCols],
                           const RowBlockOf<Dot, Source>& rows,
                           VI32 (&dot)[kCols][kRows]) {
  static_assert(Source::kLevels.parts == 1 && !Source::kLevels.has_min);
  const hn::RebindToUnsigned<DI16> du16;
  Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      dot[c][m] = hn::Set(DI32(), rows.start[0][m]);
    });
  });
  Unroll<kQuads>([&](auto quad) GKV_INLINE_ATTR {
    VI16 halves[2][kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      const auto pairs =
          hn::BitCast(du16, Source::template Quad<quad>(data[c]));
      halves[0][c] = hn::BitCast(DI16(), hn::And(pairs, hn::Set(du16, 0xFF)));
      halves[1][c] = hn::BitCast(DI16(), hn::ShiftRight<8>(pairs));
    });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      Unroll<2>([&](auto odd) GKV_INLINE_ATTR {
        const auto x = BroadcastFour(DI16(), rows.values[m][odd] + 2 * quad);
        Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
          dot[c][m] = hn::Add(
              dot[c][m], hn::WidenMulPairwiseAdd(DI32(), halves[odd][c], x));
          KeepOrder(dot[c][m]);
        });
      });
    });
  });
}

// acc[c][m] += the products of a block. `planes` are the scales of column 0,
// those of the next are `plane_step` further.
template <class Dot, class Source, class At, size_t kCols, size_t kRows>
HWY_INLINE void AddBlock(const At (&data)[kCols],
                         const RowBlockOf<Dot, Source>& rows,
                         const float* planes, size_t plane_step,
                         VF32 (&acc)[kCols][kRows]) {
  constexpr size_t kParts = Source::kLevels.parts;
  const DF32 df;
  Unroll<kParts>([&](auto part) GKV_INLINE_ATTR {
    VI32 dot[kCols][kRows];
    if constexpr (kWidened<Dot, Source>) {
      DotWidened<Dot, Source>(data, rows, dot);
    } else {
      DotPart<Dot, Source, part>(data, rows, dot);
    }
    VF32 scale[kCols];
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      scale[c] = hn::LoadU(df, planes + c * plane_step + part * kRowGroup);
    });
    Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
      const VF32 row_scale = hn::Set(df, rows.scale[m]);
      Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
        acc[c][m] = hn::MulAdd(hn::ConvertTo(df, dot[c][m]),
                               hn::Mul(scale[c], row_scale), acc[c][m]);
      });
    });
  });
  if constexpr (Source::kLevels.has_min) {
    Unroll<kCols>([&](auto c) GKV_INLINE_ATTR {
      const VF32 min = hn::LoadU(
          df, planes + c * plane_step + kParts * kRowGroup);
      Unroll<kRows>([&](auto m) GKV_INLINE_ATTR {
        acc[c][m] =
            hn::MulAdd(min, hn::Set(df, rows.scaled_sum[m]), acc[c][m]);
      });
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_BLOCK_INL_H_
