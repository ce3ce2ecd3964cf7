#include "gemmakv/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/error.h"

namespace gkv {
namespace {

constexpr size_t kVocab = 100;
const float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();

// The message of the refusal, or "accepted".
std::string Verdict(const std::function<void(GenerateOptions&)>& change) {
  GenerateOptions options;
  change(options);
  try {
    options.Validate(kVocab);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(OptionsTest, DefaultsAndLimitsAreAccepted) {
  EXPECT_EQ(Verdict([](auto&) {}), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.max_tokens = 0; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.temperature = 100; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.min_p = 1; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.stop_token_ids = {0, 99}; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.top_logprobs = 100; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.deadline = 0; }), "accepted");
  EXPECT_EQ(Verdict([](auto& o) { o.logit_bias = {{99, -kInf}}; }), "accepted");
}

TEST(OptionsTest, EachBadValueIsNamed) {
  const auto refused = [](const char* name, auto change) {
    const std::string verdict = Verdict(change);
    EXPECT_EQ(verdict.find(std::string(name) + ": expected "), 0u) << verdict;
    EXPECT_NE(verdict.find(", found "), std::string::npos) << verdict;
  };
  for (const float bad : {kNaN, kInf, -0.1f}) {
    refused("temperature", [=](auto& o) { o.temperature = bad; });
  }
  for (const float bad : {kNaN, 0.0f, -1.0f, 1.01f}) {
    refused("top_p", [=](auto& o) { o.top_p = bad; });
  }
  for (const float bad : {kNaN, -0.1f, 1.1f}) {
    refused("min_p", [=](auto& o) { o.min_p = bad; });
  }
  for (const float bad : {kNaN, kInf, 0.0f, -1.0f}) {
    refused("repetition_penalty", [=](auto& o) { o.repetition_penalty = bad; });
  }
  refused("presence_penalty", [](auto& o) { o.presence_penalty = kNaN; });
  refused("frequency_penalty", [](auto& o) { o.frequency_penalty = kInf; });
  refused("logit_bias", [](auto& o) { o.logit_bias = {{100, 1.0f}}; });
  refused("logit_bias", [](auto& o) { o.logit_bias = {{-1, 1.0f}}; });
  refused("logit_bias", [](auto& o) { o.logit_bias = {{1, kInf}}; });
  refused("logit_bias", [](auto& o) { o.logit_bias = {{1, kNaN}}; });
  refused("stop", [](auto& o) { o.stop = {"a", ""}; });
  refused("stop_token_ids", [](auto& o) { o.stop_token_ids = {5, 100}; });
  refused("stop_token_ids", [](auto& o) { o.stop_token_ids = {-1}; });
  refused("top_logprobs", [](auto& o) { o.top_logprobs = 101; });
  for (const double bad : {double{kNaN}, double{kInf}, -0.5}) {
    refused("deadline", [=](auto& o) { o.deadline = bad; });
  }
}

}  // namespace
}  // namespace gkv
