#include "gemmakv/options.h"

#include <cmath>

#include "base/error.h"

namespace gkv {
namespace {

void Check(bool ok, const char* name, double value, const char* expected) {
  if (!ok) {
    throw InvalidArgument(StrCat(name, " is ", value, ", expected ", expected));
  }
}

}  // namespace

bool GenerateOptions::IsGreedy() const {
  return temperature <= 0 && !logprobs && logit_bias.empty() &&
         repetition_penalty == 1 && presence_penalty == 0 &&
         frequency_penalty == 0;
}

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
  for (const auto& [id, bias] : logit_bias) {
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("logit_bias names token ", id,
                                   ", expected an id in 0..", vocab_size - 1));
    }
    if (std::isnan(bias) || bias == INFINITY) {
      throw InvalidArgument(StrCat("logit_bias of token ", id, " is ", bias,
                                   ", expected a finite number or -inf"));
    }
  }
  for (const std::string& text : stop) {
    if (text.empty()) {
      throw InvalidArgument("stop holds an empty string, expected text");
    }
  }
}

}  // namespace gkv
