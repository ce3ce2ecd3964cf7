#ifndef GEMMAKV_OPS_ELEMENTWISE_H_
#define GEMMAKV_OPS_ELEMENTWISE_H_

#include <cstddef>

// Operations on one row of activations. They give the same bits on every target
// with fused multiply-add: reductions keep 16 partial sums (element i goes to
// partial i % 16, ascending) and join them in one fixed tree. `size` is any
// length, and pointers need no alignment. `out` may equal an input, but may not
// overlap one otherwise.

namespace gkv {

// out[i] = x[i] * rsqrt(mean(x^2) + epsilon) * weight[i].
void RmsNorm(const float* x, const float* weight, float epsilon, size_t size,
             float* out);

// x[i] += RmsNorm(y)[i]: the residual addition after a post-norm.
void AddRmsNorm(const float* y, const float* weight, float epsilon, size_t size,
                float* x);

// x[i] += y[i].
void Add(const float* y, size_t size, float* x);

// x[i] += factor * y[i].
void AddScaled(float factor, const float* y, size_t size, float* x);

// x[i] = exp(x[i]) / sum of exp(x[j]).
void Softmax(size_t size, float* x);
// x[i] *= y[i].
void Multiply(const float* y, size_t size, float* x);

// x[i] *= factor.
void Scale(float factor, size_t size, float* x);

// out[i] = gelu_tanh(gate[i]) * up[i], gelu_tanh(x) =
// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
void GeluMul(const float* gate, const float* up, size_t size, float* out);

// x[i] = max(0, x[i] - (mean(x) + cutoff * deviation(x))), where the deviation
// divides the sum of squares by `size`.
void GaussianTopK(float cutoff, size_t size, float* x);

// x[i] = cap * tanh(x[i] / cap).
void SoftCap(float cap, size_t size, float* x);

// Rotates pairs (x[i], x[i + size / 2]) by the angle whose cosine and sine are
// cos[i] and sin[i], i < size / 2. Requires: size is even.
void Rotate(const float* cos, const float* sin, size_t size, float* x);

}  // namespace gkv

#endif  // GEMMAKV_OPS_ELEMENTWISE_H_
