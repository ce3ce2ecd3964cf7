#include "engine/model_drafter.h"

#include <algorithm>
#include <utility>

namespace gkv {
namespace {

// How often a model is right before that is known, and the weight of that.
constexpr double kFirstRight = 0.7, kFirstWeight = 8;
// Weight of the last step among those that a time is learned from, and how much
// longer one may take before it counts as interrupted.
constexpr double kLearningRate = 0.2, kLongest = 1.5;

}  // namespace

void RightShare::Note(bool was_right, double most_weight) {
  weight = std::min(weight + 1, most_weight);
  value += ((was_right ? 1 : 0) - value) / weight;
}

void LearnedTime::Note(double seconds) {
  if (mean_ == 0) {
    mean_ = seconds;
  } else if (!known_) {
    mean_ = std::min(mean_, seconds);
    known_ = true;
  } else {
    mean_ += kLearningRate * (std::min(seconds, kLongest * mean_) - mean_);
  }
}

double MatrixBytes(const Model& model) {
  double bytes = 0;
  for (const MatrixInfo& m : model.weights.matrices) {
    bytes += static_cast<double>(m.rows * RowBytes(m.type, m.cols));
  }
  return bytes;
}

ModelDrafter::ModelDrafter(std::shared_ptr<const Model> model,
                           double size_share)
    : model_(std::move(model)),
      right_{kFirstRight, kFirstWeight},
      size_share_(size_share) {}

double ModelDrafter::RoundSeconds(size_t conversations, double step_s) const {
  const size_t at = std::min(conversations, kMaxConversations) - 1;
  const auto known = [this](size_t i) { return rounds_[i].seconds(); };
  if (known(at) > 0) return known(at);
  // Of the nearest number that is known, more taking longer.
  for (size_t i = at; i-- > 0;) {
    if (known(i) > 0) {
      return known(i) * (1 + 0.05 * static_cast<double>(at - i));
    }
  }
  for (size_t i = at + 1; i < kMaxConversations; ++i) {
    if (known(i) > 0) return known(i);
  }
  return step_s * size_share_;
}

void ModelDrafter::NoteRound(size_t conversations, double seconds) {
  rounds_[conversations - 1].Note(seconds);
}

double ModelDrafter::SecondsSince(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

}  // namespace gkv
