#include "ops/altup.h"

#ifndef GKV_KERNEL_BATCH
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/altup.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

float MeanSquare(const float* x, size_t size) {
  const float sum = Sum16(x, size, [](VF32 v, VF32 acc) HWY_ATTR {
    return hn::MulAdd(v, v, acc);
  });
  return sum / static_cast<float>(size);
}

float Root(float x) {
  const hn::CappedTag<float, 1> d1;
  return hn::GetLane(hn::Sqrt(hn::Set(d1, x)));
}

// Sum over i of x[i] * norm[i] * router[i], in sixteen partials.
float Dot3(const float* x, const float* norm, const float* router,
           size_t size) {
  const DF32 d;
  VF32 acc[kVectorsPer16];
  for (size_t v = 0; v < kVectorsPer16; ++v) acc[v] = hn::Zero(d);
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      const size_t at = i + v * kLanes;
      const auto scaled =
          hn::Mul(hn::LoadU(d, x + at), hn::LoadU(d, norm + at));
      acc[v] = hn::MulAdd(scaled, hn::LoadU(d, router + at), acc[v]);
    }
  }
  if (i < size) {
    HWY_ALIGN float tail[3][16] = {};
    for (size_t j = i; j < size; ++j) {
      tail[0][j - i] = x[j];
      tail[1][j - i] = norm[j];
      tail[2][j - i] = router[j];
    }
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      const size_t at = v * kLanes;
      const auto scaled =
          hn::Mul(hn::Load(d, tail[0] + at), hn::Load(d, tail[1] + at));
      acc[v] = hn::MulAdd(scaled, hn::Load(d, tail[2] + at), acc[v]);
    }
  }
  HWY_ALIGN float partials[16];
  for (size_t v = 0; v < kVectorsPer16; ++v) {
    hn::Store(acc[v], d, partials + v * kLanes);
  }
  return JoinSums(partials);
}

void AltUpRouteImpl(const float* x, const float* norm, const float* router,
                    float epsilon, size_t size, size_t inputs, float* routes) {
  const float inverse = 1.0f / Root(MeanSquare(x, size) + epsilon);
  const float scale = inverse / static_cast<float>(size);
  for (size_t k = 0; k < inputs; ++k) {
    routes[k] = Dot3(x, norm, router + k * size, size) * scale;
  }
  const DF32 d;
  ForVectors(inputs, [&](size_t k, size_t count) HWY_ATTR {
    StoreUpTo(hn::Tanh(d, LoadUpTo(routes + k, count)), routes + k, count);
  });
}

void AltUpPredictImpl(const float* coefs, const float* routes, size_t size,
                      size_t inputs, size_t stride, float* streams) {
  const DF32 d;
  float map[kMaxAltUpInputs * kMaxAltUpInputs];
  for (size_t m = 0; m < inputs * inputs; ++m) {
    map[m] = 0;
    for (size_t k = 0; k < inputs; ++k) {
      map[m] += coefs[m * inputs + k] * routes[k];
    }
  }
  ForVectors(size, [&](size_t c, size_t count) HWY_ATTR {
    VF32 old[kMaxAltUpInputs];
    for (size_t i = 0; i < inputs; ++i) {
      old[i] = LoadUpTo(streams + i * stride + c, count);
    }
    for (size_t j = 0; j < inputs; ++j) {
      auto sum = hn::Mul(hn::Set(d, map[j * inputs]), old[0]);
      for (size_t i = 1; i < inputs; ++i) {
        sum = hn::MulAdd(hn::Set(d, map[j * inputs + i]), old[i], sum);
      }
      StoreUpTo(hn::Add(old[j], sum), streams + j * stride + c, count);
    }
  });
}

void AltUpCorrectImpl(const float* coefs, const float* routes,
                      const float* activated, size_t size, size_t inputs,
                      size_t active, size_t stride, float* streams) {
  const DF32 d;
  float factors[kMaxAltUpInputs];
  for (size_t i = 0; i < inputs; ++i) {
    factors[i] = 0;
    for (size_t k = 0; k < inputs; ++k) {
      factors[i] += coefs[i * inputs + k] * routes[k];
    }
    factors[i] += 1.0f;
  }
  ForVectors(size, [&](size_t c, size_t count) HWY_ATTR {
    const auto change =
        hn::Sub(LoadUpTo(activated + c, count),
                LoadUpTo(streams + active * stride + c, count));
    for (size_t i = 0; i < inputs; ++i) {
      float* const at = streams + i * stride + c;
      StoreUpTo(
          hn::MulAdd(hn::Set(d, factors[i]), change, LoadUpTo(at, count)), at,
          count);
    }
  });
}

void MatchRmsImpl(const float* like, size_t size, float* x) {
  const DF32 d;
  const float own = MeanSquare(x, size);
  // NaN stays.
  const float least = own < 1e-5f ? 1e-5f : own;
  const auto factor =
      hn::Set(d, Root(MeanSquare(like, size)) / Root(least));
  ForVectors(size, [&](size_t i, size_t count) HWY_ATTR {
    StoreUpTo(hn::Mul(LoadUpTo(x + i, count), factor), x + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(AltUpRouteImpl);
HWY_EXPORT(AltUpPredictImpl);
HWY_EXPORT(AltUpCorrectImpl);
HWY_EXPORT(MatchRmsImpl);

void AltUpRoute(const float* x, const float* norm, const float* router,
                float epsilon, size_t size, size_t inputs, float* routes) {
  HWY_DYNAMIC_DISPATCH(AltUpRouteImpl)
  (x, norm, router, epsilon, size, inputs, routes);
}

void AltUpPredict(const float* coefs, const float* routes, size_t size,
                  size_t inputs, size_t stride, float* streams) {
  HWY_DYNAMIC_DISPATCH(AltUpPredictImpl)
  (coefs, routes, size, inputs, stride, streams);
}

void AltUpCorrect(const float* coefs, const float* routes,
                  const float* activated, size_t size, size_t inputs,
                  size_t active, size_t stride, float* streams) {
  HWY_DYNAMIC_DISPATCH(AltUpCorrectImpl)
  (coefs, routes, activated, size, inputs, active, stride, streams);
}

void MatchRms(const float* like, size_t size, float* x) {
  HWY_DYNAMIC_DISPATCH(MatchRmsImpl)(like, size, x);
}

}  // namespace gkv

#endif  // HWY_ONCE
