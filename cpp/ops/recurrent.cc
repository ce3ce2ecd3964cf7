#include "ops/recurrent.h"

#include <cstring>

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Returns exp(x) for x <= 88, above which it would overflow; NaN stays.
HWY_INLINE VF32 ExpOf(VF32 x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(DF32(), x));
}

// At the limit of its argument the logistic function is 6e-39.
HWY_INLINE VF32 Sigmoid(VF32 x) {
  const DF32 d;
  const auto one = hn::Set(d, 1.0f);
  const auto limit = hn::Set(d, -88.0f);
  const auto argument = hn::IfThenElse(hn::Lt(x, limit), limit, x);
  return hn::Div(one, hn::Add(one, ExpOf(hn::Neg(argument))));
}

void CausalConvImpl(const ChannelRows& in, size_t rows, size_t channels,
                    const float* taps, const float* bias, size_t width,
                    float* tail, float* out) {
  const size_t before = width - 1;
  for (size_t r = 0; r < rows; ++r) {
    const float* source[kMaxConvWidth];
    for (size_t k = 0; k < width; ++k) {
      const size_t at = r + k;  // counted from the tail's first row
      source[k] = at < before ? tail + at * in.stride
                              : in.data + (at - before) * in.stride;
    }
    ForVectors(channels, [&](size_t c, size_t count) HWY_ATTR {
      auto sum = LoadUpTo(bias + c, count);
      for (size_t k = 0; k < width; ++k) {
        sum = hn::MulAdd(LoadUpTo(taps + k * in.stride + c, count),
                         LoadUpTo(source[k] + c, count), sum);
      }
      StoreUpTo(sum, out + r * in.stride + c, count);
    });
  }
  // Ascending: a row that moves within the tail moves to a lower index.
  for (size_t k = 0; k < before; ++k) {
    const size_t at = rows + k;
    const float* source = at < before ? tail + at * in.stride
                                      : in.data + (at - before) * in.stride;
    std::memmove(tail + k * in.stride, source, channels * sizeof(float));
  }
}

// softplus(x) = max(x, 0) + log(1 + exp(-|x|)): no overflow, and no
// cancellation on either side.
void LruDecayImpl(const float* param, size_t size, float* decay) {
  const DF32 d;
  const auto factor = hn::Set(d, -8.0f);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto x = LoadUpTo(param + i, count);
    const auto small = ExpOf(hn::Neg(hn::Abs(x)));
    const auto softplus = hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, small));
    StoreUpTo(hn::Mul(factor, softplus), decay + i, count);
  });
}

void LruScanImpl(const ChannelRows& x, const float* input_gate,
                 const float* a_gate, const LruGates& gates, size_t position,
                 size_t rows, size_t channels, float* state, float* out) {
  const DF32 d;
  const auto one = hn::Set(d, 1.0f);
  // Rows are the outer loop: memory is read in order, and states stay in cache.
  for (size_t r = 0; r < rows; ++r) {
    const bool first = position + r == 0;
    ForVectors(channels, [&](size_t c, size_t count) HWY_ATTR {
      const size_t at = r * x.stride + c;
      const auto open = Sigmoid(hn::Add(LoadUpTo(input_gate + at, count),
                                        LoadUpTo(gates.input_bias + c, count)));
      auto h = hn::Mul(LoadUpTo(x.data + at, count), open);
      if (!first) {
        const auto gate = Sigmoid(hn::Add(LoadUpTo(a_gate + at, count),
                                          LoadUpTo(gates.a_bias + c, count)));
        const auto log_a = hn::Mul(LoadUpTo(gates.decay + c, count), gate);
        // 1 - a^2 from a - 1: where a is close to 1, which is where a state
        // lives long, subtracting from 1 would leave few digits.
        const auto a_minus_1 =
            hn::IfThenElse(hn::IsNaN(log_a), log_a, hn::Expm1(d, log_a));
        const auto a = hn::Add(one, a_minus_1);
        const auto norm =
            hn::Sqrt(hn::Mul(hn::Neg(a_minus_1), hn::Add(one, a)));
        h = hn::MulAdd(a, LoadUpTo(state + c, count), hn::Mul(norm, h));
      }
      StoreUpTo(h, state + c, count);
      StoreUpTo(h, out + at, count);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(CausalConvImpl);
HWY_EXPORT(LruDecayImpl);
HWY_EXPORT(LruScanImpl);

void CausalConv(const ChannelRows& in, size_t rows, size_t channels,
                const float* taps, const float* bias, size_t width, float* tail,
                float* out) {
  HWY_DYNAMIC_DISPATCH(CausalConvImpl)
  (in, rows, channels, taps, bias, width, tail, out);
}

void LruDecay(const float* param, size_t size, float* decay) {
  HWY_DYNAMIC_DISPATCH(LruDecayImpl)(param, size, decay);
}

void LruScan(const ChannelRows& x, const float* input_gate, const float* a_gate,
             const LruGates& gates, size_t position, size_t rows,
             size_t channels, float* state, float* out) {
  HWY_DYNAMIC_DISPATCH(LruScanImpl)
  (x, input_gate, a_gate, gates, position, rows, channels, state, out);
}

}  // namespace gkv

#endif  // HWY_ONCE
