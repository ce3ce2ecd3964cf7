#ifndef GEMMAKV_OPS_RECURRENT_H_
#define GEMMAKV_OPS_RECURRENT_H_

#include <cstddef>

// The temporal mixing of recurrent layers (RG-LRU: De et al. 2024, "Griffin",
// arXiv 2402.19427, section 2.4). Rows are consecutive positions. Channels are
// independent of each other, so calls for different `channels` may run at the
// same time. The bits are the same on every target with fused multiply-add, and
// however rows are cut into calls.

namespace gkv {

// Rows of some adjacent channels: row r starts at data + r * stride.
struct ChannelRows {
  const float* data;
  size_t stride;
};

inline constexpr size_t kMaxConvWidth = 65;

// Causal depthwise convolution:
// out[r][c] = bias[c] + sum over k of taps[k][c] * in[r - (width - 1) + k][c],
// where rows before the first are those of `tail` [width - 1], oldest first.
// Then `tail` becomes the last width - 1 inputs. taps, tail and out are
// [..][stride] as `in` is; out does not overlap in. Requires: 1 <= width <=
// kMaxConvWidth.
void CausalConv(const ChannelRows& in, size_t rows, size_t channels,
                const float* taps, const float* bias, size_t width, float* tail,
                float* out);

// decay[c] = -8 * softplus(param[c]): the logarithm of the recurrence's factor
// where its gate is fully open.
void LruDecay(const float* param, size_t size, float* decay);

// The learned values of one recurrent layer's gates, from the first channel on.
struct LruGates {
  const float* input_bias;  // [channels]
  const float* a_bias;      // [channels]
  const float* decay;       // [channels], from LruDecay
};

// The recurrence, for each row r and channel:
//   i = sigmoid(input_gate + input_bias), a = exp(decay * sigmoid(a_gate + ..))
//   state = a * state + sqrt(1 - a^2) * i * x
//   out[r] = state
// At position 0 the square root is 1 and the state counts as 0, since nothing
// comes before. `position` is that of the first row. x, the gates and out are
// [rows][stride]; out may be x. state [channels].
void LruScan(const ChannelRows& x, const float* input_gate, const float* a_gate,
             const LruGates& gates, size_t position, size_t rows,
             size_t channels, float* state, float* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_RECURRENT_H_
