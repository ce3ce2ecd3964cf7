#include "ops/quantize.h"

#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

using DI8 = hn::Rebind<int8_t, DF32>;

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

  constexpr int32_t kInfinityBits = 0x7F800000;
  constexpr int32_t kTinyBits = (127 - 118) << 23;  // 2^-118
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

void QuantizeRowsImpl(const float* x, size_t stride, size_t rows, size_t cols,
                      const QuantizedRows& out) {
  const size_t blocks = cols / kQuantBlock;
  for (size_t r = 0; r < rows; ++r) {
    for (size_t b = 0; b < blocks; ++b) {
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
