#include "engine/step_times.h"

#include <algorithm>

namespace gkv {
namespace {

// What one guess is taken to cost before that is known, and the weight of that.
constexpr double kGuessShare = 0.2;
constexpr double kGuessWeight = 0.4;
// Steps without guesses that come first.
constexpr size_t kFirstSteps = 2;
// Weight of the last step among those that a time is learned from.
constexpr double kStepRate = 0.1;
// What a step says counts so much less after each later one.
constexpr double kFading = 0.98;
constexpr double kMaxWeight = 8;
// A step that took longer was interrupted.
constexpr double kLongestStep = 1.5;
constexpr double kMoreAtOnce = 0.1;

}  // namespace

void StepTimes::Note(size_t sequences, size_t guesses, double seconds) {
  if (sequences == 0 || sequences > kMaxSequences || guesses > kMaxGuesses) {
    return;
  }
  Row& row = rows_[sequences - 1];
  for (Mean& mean : row.extra) mean.weight *= kFading;
  if (guesses == 0) {
    if (row.steps == 0) {
      row.seconds = seconds;
    } else if (row.steps < kFirstSteps) {
      row.seconds = std::min(row.seconds, seconds);
    } else {
      const double most = kLongestStep * row.seconds;
      row.seconds += kStepRate * (std::min(seconds, most) - row.seconds);
    }
    ++row.steps;
  } else if (row.steps >= kFirstSteps && row.seconds > 0) {
    Mean& mean = row.extra[guesses - 1];
    // One that took far longer than expected was interrupted, too: what
    // guesses cost is believed in steps.
    const double most =
        std::min(std::max(1.0, static_cast<double>(guesses)),
                 kLongestStep * Share(row, guesses) + kMoreAtOnce);
    const double share = std::clamp(seconds / row.seconds - 1, 0.0, most);
    mean.weight = std::min(mean.weight + 1, kMaxWeight);
    mean.value += (share - mean.value) / mean.weight;
  }
}

void StepTimes::Restart() {
  for (Row& row : rows_) row.steps = 0;
}

// What is known of this number, of others in proportion, and beforehand.
double StepTimes::Share(const Row& row, size_t guesses) {
  if (guesses == 0) return 0;
  double each = kGuessShare * kGuessWeight, weight = kGuessWeight;
  for (size_t i = 0; i < kMaxGuesses; ++i) {
    const Mean& mean = row.extra[i];
    each += mean.weight * mean.value / static_cast<double>(i + 1);
    weight += mean.weight;
  }
  each /= weight;
  const Mean& own = row.extra[guesses - 1];
  return (own.weight * own.value + each * static_cast<double>(guesses)) /
         (own.weight + 1);
}

double StepTimes::Seconds(size_t sequences) const {
  if (sequences == 0 || sequences > kMaxSequences) return 0;
  const Row& row = rows_[sequences - 1];
  return row.steps < kFirstSteps ? 0 : row.seconds;
}

size_t StepTimes::Extra(size_t sequences, size_t guesses,
                        std::span<double> extra) const {
  if (sequences == 0 || sequences > kMaxSequences || guesses > kMaxGuesses) {
    return 0;
  }
  const Row& row = rows_[sequences - 1];
  if (row.steps < kFirstSteps) return 0;
  const size_t count = std::min(extra.size(), kMaxGuesses - guesses);
  const double before = 1 + Share(row, guesses);
  for (size_t i = 0; i < count; ++i) {
    extra[i] = (1 + Share(row, guesses + i + 1)) / before - 1;
  }
  return count;
}

}  // namespace gkv
