#ifndef GEMMAKV_OPS_ALTUP_H_
#define GEMMAKV_OPS_ALTUP_H_

#include <cstddef>

// Alternating updates (AltUp: Baykal et al. 2023, arXiv 2301.13310): a position
// has several residual streams, of which a layer computes one. Operations on
// one position, in the manner of ops/elementwise.h: the same bits on every
// target with fused multiply-add. Where streams are meant, stream k is [size]
// at streams + k * stride.

namespace gkv {

inline constexpr size_t kMaxAltUpInputs = 8;

// routes[k] = tanh(sum over i of RmsNorm(x)[i] / size * router[k][i]), k <
// inputs. norm [size], router [inputs, size].
void AltUpRoute(const float* x, const float* norm, const float* router,
                float epsilon, size_t size, size_t inputs, float* routes);

// streams[j] += sum over i of (coefs[j * inputs + i] . routes) * streams[i],
// with all streams as they were. coefs [inputs^2, inputs].
void AltUpPredict(const float* coefs, const float* routes, size_t size,
                  size_t inputs, size_t stride, float* streams);

// streams[i] += (coefs[i] . routes + 1) * (activated - streams[active]), with
// the active stream as it was. coefs [inputs, inputs].
void AltUpCorrect(const float* coefs, const float* routes,
                  const float* activated, size_t size, size_t inputs,
                  size_t active, size_t stride, float* streams);

// Gives x the root mean square of `like`; that of x counts as sqrt(1e-5) if it
// is less.
void MatchRms(const float* like, size_t size, float* x);

}  // namespace gkv

#endif  // GEMMAKV_OPS_ALTUP_H_
