#include "engine/learned.h"

#include <algorithm>

namespace gkv {
namespace {

// A time counts for at most this multiple of the mean.
constexpr double kLongest = 1.5;

}  // namespace

void LearnedMean::Note(double next, double most_weight) {
  weight = std::min(weight + 1, most_weight);
  value += (next - value) / weight;
}

void LearnedTime::Note(double seconds) {
  if (mean_ == 0) {
    mean_ = seconds;
  } else if (!known_) {
    mean_ = std::min(mean_, seconds);
    known_ = true;
  } else {
    mean_ += rate_ * (std::min(seconds, kLongest * mean_) - mean_);
  }
}

}  // namespace gkv
