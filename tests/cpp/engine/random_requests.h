#ifndef GEMMAKV_TESTS_CPP_ENGINE_RANDOM_REQUESTS_H_
#define GEMMAKV_TESTS_CPP_ENGINE_RANDOM_REQUESTS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gemmakv/options.h"
#include "gemmakv/results.h"

// Requests at random, of models with the vocabulary of model/tiny_model.h.

namespace gkv {

inline constexpr size_t kTinyVocab = 97;

// Half of it repeats what was there before.
inline std::vector<int32_t> RepetitiveTokens(size_t size, std::mt19937& rng) {
  std::vector<int32_t> tokens;
  while (tokens.size() < size) {
    if (tokens.size() > 4 && rng() % 2 == 0) {
      const size_t from = rng() % (tokens.size() - 3);
      const size_t count = 1 + rng() % (tokens.size() - from);
      for (size_t i = 0; i < count; ++i) tokens.push_back(tokens[from + i]);
    } else {
      tokens.push_back(static_cast<int32_t>(2 + rng() % (kTinyVocab - 2)));
    }
  }
  tokens.resize(size);
  return tokens;
}

inline GenerateOptions RandomOptions(std::mt19937& rng) {
  const auto one_in = [&](uint32_t n) { return rng() % n == 0; };
  GenerateOptions options;
  options.max_tokens = 1 + rng() % 50;
  options.ignore_eos = one_in(2);
  options.seed = rng();
  if (one_in(3)) options.temperature = 0.2f + 0.1f * (rng() % 8);
  if (one_in(3)) options.top_k = 1 + rng() % 5;
  if (one_in(4)) options.top_p = 0.7f;
  if (one_in(4)) options.min_p = 0.1f;
  if (one_in(5)) options.repetition_penalty = 1.2f;
  if (one_in(5)) options.presence_penalty = 0.5f;
  if (one_in(5)) options.frequency_penalty = 0.3f;
  if (one_in(5)) options.logit_bias = {{5, 1.5f}, {9, -INFINITY}};
  if (one_in(5)) options.min_tokens = rng() % 20;
  if (one_in(2)) options.logprobs = true;
  if (one_in(4)) options.top_logprobs = 1 + rng() % 4;
  if (one_in(3)) {
    options.stop_token_ids = {static_cast<int32_t>(rng() % kTinyVocab)};
  }
  if (one_in(3)) {
    options.stop = {"<" + std::to_string(rng() % kTinyVocab) + "><",
                    std::to_string(rng() % 10) + "><1"};
  }
  if (one_in(6)) {
    options.logits_processor = [](std::span<const int32_t> ids,
                                  std::span<float> logits) {
      logits[ids.size() % kTinyVocab] += 2;
    };
  }
  return options;
}

// What must not depend on how tokens were found: all but the counts.
inline void ExpectSameReply(const GenerateResult& found,
                            const GenerateResult& expected) {
  ASSERT_EQ(found.token_ids, expected.token_ids);
  ASSERT_EQ(found.text, expected.text);
  ASSERT_EQ(found.logprobs, expected.logprobs);
  ASSERT_EQ(found.finish_reason, expected.finish_reason);
  ASSERT_EQ(found.top_logprobs.size(), expected.top_logprobs.size());
  for (size_t k = 0; k < found.top_logprobs.size(); ++k) {
    ASSERT_EQ(found.top_logprobs[k].id, expected.top_logprobs[k].id);
    ASSERT_EQ(found.top_logprobs[k].logprob, expected.top_logprobs[k].logprob);
  }
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_ENGINE_RANDOM_REQUESTS_H_
