#include "ops/elementwise.h"

#include <cmath>

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Returns 1 / sqrt(mean(x^2) + epsilon), by correctly rounded operations alone.
float InverseRms(const float* HWY_RESTRICT x, float epsilon, size_t size) {
  const float sum = Sum16(x, size, [](VF32 v, VF32 acc) HWY_ATTR {
    return hn::MulAdd(v, v, acc);
  });
  const hn::CappedTag<float, 1> d1;
  const auto mean = hn::Set(d1, sum / static_cast<float>(size) + epsilon);
  return 1.0f / hn::GetLane(hn::Sqrt(mean));
}

void RmsNormImpl(const float* x, const float* weight, float epsilon,
                 size_t size, float* out) {
  const DF32 d;
  const auto scale = hn::Set(d, InverseRms(x, epsilon, size));
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto normed = hn::Mul(LoadUpTo(x + i, count), scale);
    StoreUpTo(hn::Mul(normed, LoadUpTo(weight + i, count)), out + i, count);
  });
}

void AddRmsNormImpl(const float* y, const float* weight, float epsilon,
                    size_t size, float* x) {
  const DF32 d;
  const auto scale = hn::Set(d, InverseRms(y, epsilon, size));
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto normed = hn::Mul(LoadUpTo(y + i, count), scale);
    StoreUpTo(
        hn::MulAdd(normed, LoadUpTo(weight + i, count), LoadUpTo(x + i, count)),
        x + i, count);
  });
}

void AddImpl(const float* y, size_t size, float* x) {
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Add(LoadUpTo(x + i, count), LoadUpTo(y + i, count)), x + i,
              count);
  });
}

void AddScaledImpl(float factor, const float* y, size_t size, float* x) {
  const DF32 d;
  const auto f = hn::Set(d, factor);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::MulAdd(LoadUpTo(y + i, count), f, LoadUpTo(x + i, count)),
              x + i, count);
  });
}

void SoftmaxImpl(size_t size, float* x) {
  const DF32 d;
  float largest = x[0];
  for (size_t i = 1; i < size; ++i) {
    if (x[i] > largest || std::isnan(x[i])) largest = x[i];  // NaN stays
  }
  const auto max = hn::Set(d, largest);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Exp(d, hn::Sub(LoadUpTo(x + i, count), max)), x + i, count);
  });
  const float sum = Sum16(x, size, [](VF32 v, VF32 acc) HWY_ATTR {
    return hn::Add(v, acc);
  });
  // Exp has made a number of NaN; the difference is NaN again.
  const auto divisor = hn::Set(d, sum + (largest - largest));
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Div(LoadUpTo(x + i, count), divisor), x + i, count);
  });
}

void MultiplyImpl(const float* y, size_t size, float* x) {
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Mul(LoadUpTo(x + i, count), LoadUpTo(y + i, count)), x + i,
              count);
  });
}

void ScaleImpl(float factor, size_t size, float* x) {
  const DF32 d;
  const auto f = hn::Set(d, factor);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Mul(LoadUpTo(x + i, count), f), x + i, count);
  });
}

// 0.5 (1 + tanh(u)) is the logistic function of 2 u: one exponential, and no
// cancellation where tanh(u) approaches -1.
void GeluMulImpl(const float* gate, const float* up, size_t size, float* out) {
  const DF32 d;
  const auto minus_two_sqrt_2_over_pi = hn::Set(d, -1.5957691216057308f);
  const auto cubic = hn::Set(d, 0.044715f);
  const auto one = hn::Set(d, 1.0f);
  // Exp overflows for larger arguments. At the limit the logistic function is
  // 6e-39, which all gates below -10 get in its place.
  const auto limit = hn::Set(d, 88.0f);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto g = LoadUpTo(gate + i, count);
    const auto square = hn::Mul(g, g);
    const auto inner = hn::MulAdd(hn::Mul(square, g), cubic, g);
    const auto exponent =
        hn::Min(hn::Mul(inner, minus_two_sqrt_2_over_pi), limit);
    const auto gelu = hn::Div(g, hn::Add(one, hn::Exp(d, exponent)));
    StoreUpTo(hn::Mul(gelu, LoadUpTo(up + i, count)), out + i, count);
  });
}

// Takes two passes: if the mean is far from zero, so are the values, and their
// squares would lose what differs.
void GaussianTopKImpl(float cutoff, size_t size, float* x) {
  const DF32 d;
  const hn::CappedTag<float, 1> d1;
  const auto count_of = static_cast<float>(size);
  const float sum = Sum16(
      x, size, [](VF32 v, VF32 acc) HWY_ATTR { return hn::Add(acc, v); });
  const auto mean = hn::Set(d, sum / count_of);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Sub(LoadUpTo(x + i, count), mean), x + i, count);
  });
  const float squares = Sum16(x, size, [](VF32 v, VF32 acc) HWY_ATTR {
    return hn::MulAdd(v, v, acc);
  });
  const float deviation =
      hn::GetLane(hn::Sqrt(hn::Set(d1, squares / count_of)));
  const auto least = hn::Set(d, cutoff * deviation);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto above = hn::Sub(LoadUpTo(x + i, count), least);
    const auto kept =
        hn::IfThenElse(hn::Lt(above, hn::Zero(d)), hn::Zero(d), above);
    StoreUpTo(kept, x + i, count);  // keeps NaN
  });
}

void SoftCapImpl(float cap, size_t size, float* x) {
  const DF32 d;
  const auto c = hn::Set(d, cap);
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    const auto v = hn::Div(LoadUpTo(x + i, count), c);
    StoreUpTo(hn::Mul(c, hn::Tanh(d, v)), x + i, count);  // keeps NaN
  });
}

void RotateImpl(const float* cos, const float* sin, size_t size, float* x) {
  const size_t half = size / 2;
  ForVectors(half, [&](size_t i, size_t count) HWY_ATTR {
    const auto a = LoadUpTo(x + i, count);
    const auto b = LoadUpTo(x + half + i, count);
    const auto c = LoadUpTo(cos + i, count);
    const auto s = LoadUpTo(sin + i, count);
    StoreUpTo(hn::NegMulAdd(b, s, hn::Mul(a, c)), x + i, count);
    StoreUpTo(hn::MulAdd(a, s, hn::Mul(b, c)), x + half + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(RmsNormImpl);
HWY_EXPORT(AddRmsNormImpl);
HWY_EXPORT(AddImpl);
HWY_EXPORT(AddScaledImpl);
HWY_EXPORT(SoftmaxImpl);
HWY_EXPORT(MultiplyImpl);
HWY_EXPORT(ScaleImpl);
HWY_EXPORT(GeluMulImpl);
HWY_EXPORT(GaussianTopKImpl);
HWY_EXPORT(SoftCapImpl);
HWY_EXPORT(RotateImpl);

void RmsNorm(const float* x, const float* weight, float epsilon, size_t size,
             float* out) {
  HWY_DYNAMIC_DISPATCH(RmsNormImpl)(x, weight, epsilon, size, out);
}

void AddRmsNorm(const float* y, const float* weight, float epsilon, size_t size,
                float* x) {
  HWY_DYNAMIC_DISPATCH(AddRmsNormImpl)(y, weight, epsilon, size, x);
}

void Add(const float* y, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(AddImpl)(y, size, x);
}

void AddScaled(float factor, const float* y, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(AddScaledImpl)(factor, y, size, x);
}

void Softmax(size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(SoftmaxImpl)(size, x);
}

void Multiply(const float* y, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(MultiplyImpl)(y, size, x);
}

void Scale(float factor, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(ScaleImpl)(factor, size, x);
}

void GeluMul(const float* gate, const float* up, size_t size, float* out) {
  HWY_DYNAMIC_DISPATCH(GeluMulImpl)(gate, up, size, out);
}

void GaussianTopK(float cutoff, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(GaussianTopKImpl)(cutoff, size, x);
}

void SoftCap(float cap, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(SoftCapImpl)(cap, size, x);
}

void Rotate(const float* cos, const float* sin, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(RotateImpl)(cos, sin, size, x);
}

}  // namespace gkv

#endif  // HWY_ONCE
