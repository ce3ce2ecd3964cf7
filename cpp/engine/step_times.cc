#include "engine/step_times.h"

#include <algorithm>

namespace gkv {
namespace {

// The assumed cost of one guess before it is known, and the weight of that.
constexpr double kGuessShare = 0.2;
constexpr double kGuessWeight = 0.4;
// The weight of a step is multiplied by this for each later one.
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
  for (LearnedMean& mean : row.extra) mean.weight *= kFading;
  const double step = row.step.seconds();
  if (guesses == 0) {
    row.step.Note(seconds);
  } else if (step > 0) {
    // A step that took far longer than expected was interrupted, so a learned
    // cost grows by degrees.
    const double most =
        std::min(std::max(1.0, static_cast<double>(guesses)),
                 kLongestStep * Share(row, guesses) + kMoreAtOnce);
    row.extra[guesses - 1].Note(std::clamp(seconds / step - 1, 0.0, most),
                                kMaxWeight);
  }
}

void StepTimes::Restart() {
  for (Row& row : rows_) row.step.Restart();
}

// Returns the additional time of so many guesses, as a share of a step: the
// weighted mean of what steps with this number showed, of other numbers in
// proportion, and of the assumption.
double StepTimes::Share(const Row& row, size_t guesses) {
  double each = kGuessShare * kGuessWeight, weight = kGuessWeight;
  for (size_t i = 0; i < kMaxGuesses; ++i) {
    const LearnedMean& mean = row.extra[i];
    each += mean.weight * mean.value / static_cast<double>(i + 1);
    weight += mean.weight;
  }
  each /= weight;
  const LearnedMean& own = row.extra[guesses - 1];
  return (own.weight * own.value + each * static_cast<double>(guesses)) /
         (own.weight + 1);
}

double StepTimes::Seconds(size_t sequences) const {
  if (sequences == 0 || sequences > kMaxSequences) return 0;
  return rows_[sequences - 1].step.seconds();
}

size_t StepTimes::FillExtra(size_t sequences, std::span<double> extra) const {
  if (Seconds(sequences) == 0) return 0;
  const size_t count = std::min(extra.size(), kMaxGuesses);
  for (size_t i = 0; i < count; ++i) {
    extra[i] = Share(rows_[sequences - 1], i + 1);
  }
  return count;
}

}  // namespace gkv
