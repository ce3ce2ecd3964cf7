#ifndef GEMMAKV_OPS_ALTUP_H_
#define GEMMAKV_OPS_ALTUP_H_

#include <cstddef>

// Alternating updates (AltUp: Baykal et al. 2023, arXiv 2301.13310): a position
// has several residual streams, of which a layer computes one. These operations
// are on one position, in the manner of ops/elementwise.h: they give the same
// bits on every target with fused multiply-add. Stream k is [size] at
// streams + k * stride.

namespace gkv {

inline constexpr size_t kMaxAltUpInputs = 8;

// routes[k] = tanh(sum over i of RmsNorm(x)[i] / size * router[k][i]), k <
// inputs. norm [size], router [inputs, size].
void AltUpRoute(const float* x, const float* norm, const float* router,
                float epsilon, size_t size, size_t inputs, float* routes);

// streams[j] += sum over i of (coefs[j * inputs + i] . routes) * streams[i],
// where the sum reads all streams as they were before. coefs [inputs^2,
// inputs].
void AltUpPredict(const float* coefs, const float* routes, size_t size,
                  size_t inputs, size_t stride, float* streams);

// streams[i] += (coefs[i] . routes + 1) * (activated - streams[active]), where
// the active stream is read as it was before. coefs [inputs, inputs].
void AltUpCorrect(const float* coefs, const float* routes,
                  const float* activated, size_t size, size_t inputs,
                  size_t active, size_t stride, float* streams);

// Scales x to the root mean square of `like`. That of x counts as sqrt(1e-5) if
// it is less.
void MatchRms(const float* like, size_t size, float* x);

}  // namespace gkv

#endif  // GEMMAKV_OPS_ALTUP_H_
