#include "gemmakv/options.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

void Check(bool ok, const char* name, double value, const char* expected) {
  if (!ok) {
    throw InvalidArgument(Unexpected(name, expected, value));
  }
}

}  // namespace

void GenerateOptions::Validate(size_t vocab_size) const {
  Check(std::isfinite(temperature) && temperature >= 0, "temperature",
        temperature, "a finite number >= 0");
  Check(top_p > 0 && top_p <= 1, "top_p", top_p, "a number in (0, 1]");
  Check(min_p >= 0 && min_p <= 1, "min_p", min_p, "a number in [0, 1]");
  Check(std::isfinite(repetition_penalty) && repetition_penalty > 0,
        "repetition_penalty", repetition_penalty, "a finite number > 0");
  Check(std::isfinite(presence_penalty), "presence_penalty", presence_penalty,
        "a finite number");
  Check(std::isfinite(frequency_penalty), "frequency_penalty",
        frequency_penalty, "a finite number");
  const auto check_id = [&](const char* name, int32_t id) {
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(
          Unexpected(name, StrCat("token ids in 0..", vocab_size - 1), id));
    }
  };
  for (const int32_t id : stop_token_ids) check_id("stop_token_ids", id);
  if (top_logprobs > vocab_size) {
    throw InvalidArgument(Unexpected(
        "top_logprobs", StrCat("at most ", vocab_size, ", the vocabulary"),
        top_logprobs));
  }
  if (deadline) {
    Check(std::isfinite(*deadline) && *deadline >= 0, "deadline", *deadline,
          "a finite number >= 0");
  }
  for (const auto& [id, bias] : logit_bias) {
    check_id("logit_bias", id);
    if (std::isnan(bias) || bias == INFINITY) {
      throw InvalidArgument(
          Unexpected("logit_bias", "finite numbers or -inf",
                     StrCat(bias, " for token ", id)));
    }
  }
  for (const std::vector<std::string>* texts : {&stop, &reply_stop}) {
    if (std::find(texts->begin(), texts->end(), "") != texts->end()) {
      throw InvalidArgument(Unexpected("stop", "text", "an empty one"));
    }
  }
}

}  // namespace gkv
