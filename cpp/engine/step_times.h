#ifndef GEMMAKV_ENGINE_STEP_TIMES_H_
#define GEMMAKV_ENGINE_STEP_TIMES_H_

#include <array>
#include <cstddef>
#include <span>

#include "engine/learned.h"

namespace gkv {

// Learns what guesses cost: how much longer steps take with them. It learns
// from steps that only decode. Old steps count little, so that a cost that was
// once too high is tried again.
class StepTimes {
 public:
  // More are not told apart.
  static constexpr size_t kMaxSequences = 32;
  static constexpr size_t kMaxGuesses = 32;

  // Notes a step that decoded so many sequences, with so many guesses in total.
  void Note(size_t sequences, size_t guesses, double seconds);
  // Notes that other conversations decode from now on: their steps may take
  // longer or shorter.
  void Restart();
  // Returns the time of a step of so many sequences without guesses; 0: not
  // known.
  double Seconds(size_t sequences) const;
  // Fills `extra` as GuessCosts has it, and returns the number of known
  // entries: none before a few steps without guesses.
  size_t FillExtra(size_t sequences, std::span<double> extra) const;

 private:
  struct Row {
    LearnedTime step{0.1};  // without guesses
    // [i]: the additional time of i + 1 guesses, as a share of `step`.
    std::array<LearnedMean, kMaxGuesses> extra = {};
  };

  static double Share(const Row& row, size_t guesses);

  std::array<Row, kMaxSequences> rows_ = {};
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STEP_TIMES_H_
