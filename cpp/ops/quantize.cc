#include "ops/quantize.h"

#include <limits>

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

using DI8 = hn::Rebind<int8_t, DF32>;

constexpr int32_t kInfinityBits = 0x7F800000;
constexpr int32_t kTinyBits = (127 - 118) << 23;  // 2^-118

struct BlockResult {
  float scale;
  int32_t sum;
};

// Every step is either one correctly rounded operation per value or an integer
// reduction, so all targets agree bit for bit.
BlockResult QuantizeBlock(const float* HWY_RESTRICT x,
                          int8_t* HWY_RESTRICT values) {
  const DF32 df;
  const DI32 di32;
  const DI8 di8;
  // Magnitudes compare like their bit patterns, with infinity and NaN on top.
  auto max_bits = hn::Zero(di32);
  for (size_t i = 0; i < kQuantBlock; i += kLanes) {
    max_bits =
        hn::Max(max_bits, hn::BitCast(di32, hn::Abs(hn::LoadU(df, x + i))));
  }
  const int32_t bits = hn::ReduceMax(di32, max_bits);

  if (bits < kTinyBits || bits >= kInfinityBits) {
    for (size_t i = 0; i < kQuantBlock; i += kLanes) {
      hn::StoreU(hn::Zero(di8), di8, values + i);
    }
    return {bits < kTinyBits ? 0.0f : std::numeric_limits<float>::quiet_NaN(),
            0};
  }

  float max;
  hwy::CopyBytes<sizeof(max)>(&bits, &max);
  const auto inverse = hn::Set(df, 127.0f / max);
  auto sum = hn::Zero(di32);
  for (size_t i = 0; i < kQuantBlock; i += kLanes) {
    const auto q = hn::NearestInt(hn::Mul(hn::LoadU(df, x + i), inverse));
    sum = hn::Add(sum, q);
    hn::StoreU(hn::DemoteTo(di8, q), di8, values + i);
  }
  return {max / 127.0f, hn::ReduceSum(di32, sum)};
}

// Reduces all lanes of each v[i] with `op`, which is commutative and
// associative. Lane i of every four of the result is the reduction of v[i].
template <typename Op>
HWY_INLINE VI32 ReduceFour(const VI32 (&v)[4], const Op& op) {
  const DI32 d;
  const hn::Repartition<int64_t, DI32> d64;
  const auto pair = [&](VI32 a, VI32 b) HWY_ATTR {
    return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto low = hn::BitCast(d64, pair(v[0], v[1]));
  const auto high = hn::BitCast(d64, pair(v[2], v[3]));
  auto all = op(hn::BitCast(d, hn::InterleaveLower(d64, low, high)),
                hn::BitCast(d, hn::InterleaveUpper(d64, low, high)));
#if HWY_MAX_BYTES >= 32
  if constexpr (kLanes >= 8) all = op(all, hn::SwapAdjacentBlocks(all));
  if constexpr (kLanes >= 16) all = op(all, hn::ReverseBlocks(d, all));
#endif
  return all;
}

// Quantizes four blocks, whose reductions and divisions share instructions. The
// bits are those of each block alone. Returns false, and writes nothing, if one
// of the blocks has no ordinary maximum.
HWY_INLINE bool QuantizeFourBlocks(const float* HWY_RESTRICT x,
                                   int8_t* HWY_RESTRICT values,
                                   float* HWY_RESTRICT scales,
                                   int32_t* HWY_RESTRICT block_sums) {
  const DF32 df;
  const DI32 di32;
  const DI8 di8;
  const hn::CappedTag<float, 4> df4;
  const hn::CappedTag<int32_t, 4> di4;
  static_assert(kLanes >= 4);
  VI32 reduced[4];
  for (size_t b = 0; b < 4; ++b) {
    reduced[b] = hn::Zero(di32);
    for (size_t i = 0; i < kQuantBlock; i += kLanes) {
      const auto v = hn::LoadU(df, x + b * kQuantBlock + i);
      reduced[b] = hn::Max(reduced[b], hn::BitCast(di32, hn::Abs(v)));
    }
  }
  const auto bits = hn::ResizeBitCast(
      di4, ReduceFour(reduced, [](VI32 a, VI32 b) HWY_ATTR {
        return hn::Max(a, b);
      }));
  const auto plain = hn::And(hn::Ge(bits, hn::Set(di4, kTinyBits)),
                             hn::Lt(bits, hn::Set(di4, kInfinityBits)));
  if (!hn::AllTrue(di4, plain)) return false;
  const auto max = hn::BitCast(df4, bits);
  HWY_ALIGN float inverses[4];
  hn::Store(hn::Div(hn::Set(df4, 127.0f), max), df4, inverses);
  hn::StoreU(hn::Div(max, hn::Set(df4, 127.0f)), df4, scales);
  for (size_t b = 0; b < 4; ++b) {
    const auto inverse = hn::Set(df, inverses[b]);
    reduced[b] = hn::Zero(di32);
    for (size_t i = 0; i < kQuantBlock; i += kLanes) {
      const size_t at = b * kQuantBlock + i;
      const auto q = hn::NearestInt(hn::Mul(hn::LoadU(df, x + at), inverse));
      reduced[b] = hn::Add(reduced[b], q);
      hn::StoreU(hn::DemoteTo(di8, q), di8, values + at);
    }
  }
  const auto sums = ReduceFour(
      reduced, [](VI32 a, VI32 b) HWY_ATTR { return hn::Add(a, b); });
  hn::StoreU(hn::ResizeBitCast(di4, sums), di4, block_sums);
  return true;
}

void QuantizeRowsImpl(const float* x, size_t stride, size_t rows, size_t cols,
                      const QuantizedRows& out) {
  const size_t blocks = cols / kQuantBlock;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t b = 0; b < blocks; ++b) {
      if (b + 4 <= blocks &&
          QuantizeFourBlocks(x + r * stride + b * kQuantBlock,
                             out.values + r * cols + b * kQuantBlock,
                             out.scales + r * blocks + b,
                             out.sums + r * blocks + b)) {
        b += 3;
        continue;
      }
      const BlockResult result =
          QuantizeBlock(x + r * stride + b * kQuantBlock,
                        out.values + r * cols + b * kQuantBlock);
      out.scales[r * blocks + b] = result.scale;
      out.sums[r * blocks + b] = result.sum;
    }
  }
}

void QuantizationErrorImpl(const float* x, size_t cols,
                           const QuantizedRows& quantized, float* out) {
  const DF32 df;
  const DI32 di32;
  const DI8 di8;
  for (size_t i = 0; i < cols; i += kLanes) {
    const auto scale = hn::Set(df, quantized.scales[i / kQuantBlock]);
    const auto value = hn::ConvertTo(
        df, hn::PromoteTo(di32, hn::LoadU(di8, quantized.values + i)));
    hn::StoreU(hn::NegMulAdd(value, scale, hn::LoadU(df, x + i)), df, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(QuantizeRowsImpl);
HWY_EXPORT(QuantizationErrorImpl);

void QuantizeRows(const float* x, size_t stride, size_t rows, size_t cols,
                  const QuantizedRows& out) {
  HWY_DYNAMIC_DISPATCH(QuantizeRowsImpl)(x, stride, rows, cols, out);
}

void QuantizationError(const float* x, size_t cols,
                       const QuantizedRows& quantized, float* out) {
  HWY_DYNAMIC_DISPATCH(QuantizationErrorImpl)(x, cols, quantized, out);
}

}  // namespace gkv

#endif  // HWY_ONCE
