#ifndef GEMMAKV_OPTIONS_H_
#define GEMMAKV_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gkv {

// How one request samples and when it stops. Defaults: greedy, 256 tokens.
//
// A token is drawn in this order: logit_bias, repetition, presence and
// frequency penalties; temperature; top_k; top_p of what is left; min_p; then
// one draw that depends on (seed, position) alone. Temperature 0 takes the
// largest logit after bias and penalties.
struct GenerateOptions {
  size_t max_tokens = 256;       // 0 computes the prompt only
  float temperature = 0;         // >= 0
  size_t top_k = 0;              // 0: no limit
  float top_p = 1;               // (0, 1]
  float min_p = 0;               // [0, 1]: relative to the likeliest token
  float repetition_penalty = 1;  // > 0; divides positive logits of tokens in
                                 // the transcript, multiplies negative ones
  float presence_penalty = 0;    // subtracted once per token generated before
  float frequency_penalty = 0;   // subtracted per occurrence in the generated
  std::vector<std::pair<int32_t, float>> logit_bias;  // -inf bans a token
  std::optional<uint64_t> seed;   // nullopt: drawn, and reported
  std::vector<std::string> stop;  // UTF-8; the text ends before the first one
  std::optional<std::vector<int32_t>> stop_ids;  // nullopt: the model's eos ids
  bool logprobs = false;  // log-probability of each token under the raw logits

  // Whether every token is the one with the largest logit as the model gives
  // it, and nothing else is asked about the logits.
  bool IsGreedy() const;
  // Throws InvalidArgument naming the option, what it is and what it may be.
  void Validate(size_t vocab_size) const;
};

}  // namespace gkv

#endif  // GEMMAKV_OPTIONS_H_
