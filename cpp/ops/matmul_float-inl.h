// Products of floating-point weights with float activations. Included once per
// Highway target.

#if defined(GEMMAKV_OPS_MATMUL_FLOAT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_MATMUL_FLOAT_INL_H_
#undef GEMMAKV_OPS_MATMUL_FLOAT_INL_H_
#else
#define GEMMAKV_OPS_MATMUL_FLOAT_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/rounding.h"
#include "base/bytes.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/matmul_common-inl.h"
#include "ops/matmul_kernel.h"

// A packed group is [cols][16] values in the file's own type. The arithmetic:
//   acc = 0; for each column, ascending: acc = fma(weight, activation, acc)
// with one accumulator per output.

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Two columns of f32 weights over a panel fill two thirds of L1.
inline constexpr size_t kFloatPanel = 256;
inline constexpr size_t kFloatChunkRows = 10 * kTileRows;

struct FloatColumn {
  const uint8_t* weights;  // of the panel's first column
  float* acc;              // [rows][kRowGroup]
  size_t ahead;            // bytes to the weights to prefetch; 0: none
};

template <class Format, size_t kCols, size_t kRows>
void FloatTile(const FloatColumn* columns, const float* x, size_t stride,
               size_t depth) {
  constexpr size_t kStep = sizeof(typename Format::Element) * kRowGroup;
  const DF32 df;
  const uint8_t* weights[kCols];
  const float* rows[kRows];
  VF32 acc[kCols][kRows];
  Unroll<kCols>([&](auto c) HWY_ATTR {
    weights[c] = columns[c].weights;
    Unroll<kRows>([&](auto m) HWY_ATTR {
      acc[c][m] = hn::LoadU(df, columns[c].acc + m * kRowGroup);
    });
  });
  Unroll<kRows>([&](auto m) HWY_ATTR { rows[m] = x + m * stride; });
  for (size_t k = 0; k < depth; ++k) {
    for (size_t c = 0; c < kCols; ++c) {
      if (columns[c].ahead == 0) continue;
      hwy::Prefetch(weights[c] + columns[c].ahead + k * kStep);
    }
    VF32 w[kCols];
    Unroll<kCols>([&](auto c) HWY_ATTR {
      w[c] = Format::Load(weights[c] + k * kStep);
    });
    Unroll<kRows>([&](auto m) HWY_ATTR {
      const VF32 broadcast = hn::Set(df, rows[m][k]);
      Unroll<kCols>([&](auto c) HWY_ATTR {
        acc[c][m] = hn::MulAdd(w[c], broadcast, acc[c][m]);
      });
    });
  }
  Unroll<kCols>([&](auto c) HWY_ATTR {
    Unroll<kRows>([&](auto m) HWY_ATTR {
      hn::StoreU(acc[c][m], df, columns[c].acc + m * kRowGroup);
    });
  });
}

// All `rows` rows in tiles of nearly equal size.
template <class Format, size_t kCols>
void FloatRows(const FloatColumn* columns, const float* x, size_t stride,
               size_t rows, size_t depth) {
  const size_t tiles = CeilDiv(rows, kTileRows);
  size_t row = 0;
  for (size_t t = 0; t < tiles; ++t) {
    const size_t end = rows * (t + 1) / tiles;
    FloatColumn at[kCols];
    for (size_t c = 0; c < kCols; ++c) {
      at[c] = {columns[c].weights, columns[c].acc + row * kRowGroup,
               tiles == 1 || t == c ? columns[c].ahead : 0};
    }
    Unroll<kTileRows>([&](auto m) HWY_ATTR {
      if (end - row == m + 1) {
        FloatTile<Format, kCols, m + 1>(at, x + row * stride, stride, depth);
      }
    });
    row = end;
  }
}

// Adds the products of all columns to acc [groups][kFloatChunkRows][kRowGroup].
// The weights `ahead` bytes further on are prefetched.
template <class Format>
void FloatGroups(const uint8_t* packed, size_t groups, size_t cols,
                 const float* x, size_t stride, size_t rows, size_t ahead,
                 float* acc) {
  constexpr size_t kBytes = sizeof(typename Format::Element);
  for (size_t k0 = 0; k0 < cols; k0 += kFloatPanel) {
    const size_t depth = std::min(kFloatPanel, cols - k0);
    FloatColumn columns[kTileGroups * kSlices];
    const size_t count = groups * kSlices;
    for (size_t c = 0; c < count; ++c) {
      const size_t g = c / kSlices, lane = c % kSlices * kLanes;
      columns[c] = {
          packed + ((g * cols + k0) * kRowGroup + lane) * kBytes,
          acc + g * kFloatChunkRows * kRowGroup + lane, ahead};
    }
    size_t c = 0;
    for (; c + kTileColumns <= count; c += kTileColumns) {
      FloatRows<Format, kTileColumns>(columns + c, x + k0, stride, rows, depth);
    }
    if (c < count) {
      FloatRows<Format, 1>(columns + c, x + k0, stride, rows, depth);
    }
  }
}

// The kernel of weights of Format: kType, Element, Load (one vector of
// elements) and ToFloat (one).
template <class Format>
struct FloatKernel {
  using Element = typename Format::Element;
  static constexpr Levels kLevels = {};

  static void PackGroup(const uint8_t* source, size_t rows, size_t cols,
                        uint8_t* group) {
    for (size_t k = 0; k < cols; ++k) {
      for (size_t r = 0; r < kRowGroup; ++r, group += sizeof(Element)) {
        Element value = 0;
        if (r < rows) {
          std::memcpy(&value, source + (r * cols + k) * sizeof(value),
                      sizeof(value));
        }
        std::memcpy(group, &value, sizeof(value));
      }
    }
  }

  static void UnpackRow(const uint8_t* group, size_t row, size_t cols,
                        float* out) {
    for (size_t k = 0; k < cols; ++k) {
      out[k] = Format::ToFloat(LoadUnaligned<Element>(
          group + (k * kRowGroup + row) * sizeof(Element)));
    }
  }

  static void SquaredNorms(const uint8_t* group, size_t cols, float* out) {
    const DF32 df;
    for (size_t i = 0; i < kRowGroup; i += kLanes) {
      VF32 sum = hn::Zero(df);
      for (size_t k = 0; k < cols; ++k) {
        const VF32 w =
            Format::Load(group + (k * kRowGroup + i) * sizeof(Element));
        sum = hn::MulAdd(w, w, sum);
      }
      hn::StoreU(hn::Mul(sum, hn::Set(df, kNormSlack)), df, out + i);
    }
  }

  static void MatMul(const MatMulTask& task) {
    const auto [weights, input, group_begin, group_end, scratch, out,
                out_stride] = task;
    const size_t group_bytes = GroupBytes(Format::kType, weights.cols);
    using Sums = float[kFloatChunkRows][kRowGroup];
    static_assert(kTileGroups * sizeof(Sums) <= kMatMulScratchBytes);
    auto* const acc = reinterpret_cast<Sums*>(scratch);
    for (size_t m0 = 0; m0 < input.rows; m0 += kFloatChunkRows) {
      const size_t rows = std::min(kFloatChunkRows, input.rows - m0);
      for (size_t g0 = group_begin; g0 < group_end; g0 += kTileGroups) {
        const size_t groups = std::min(kTileGroups, group_end - g0);
        for (size_t g = 0; g < groups; ++g) {
          std::memset(acc[g], 0, rows * kRowGroup * sizeof(float));
        }
        const bool more = g0 + 2 * kTileGroups <= NumGroups(weights.rows);
        FloatGroups<Format>(weights.data + g0 * group_bytes, groups,
                            weights.cols, input.floats + m0 * input.stride,
                            input.stride, rows,
                            m0 == 0 && more ? kTileGroups * group_bytes : 0,
                            &acc[0][0][0]);
        for (size_t g = 0; g < groups; ++g) {
          const size_t first = (g0 + g) * kRowGroup;
          StoreGroup(&acc[g][0][0], rows,
                     std::min(kRowGroup, weights.rows - first),
                     out + m0 * out_stride + first, out_stride);
        }
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_MATMUL_FLOAT_INL_H_
