#ifndef GEMMAKV_ENGINE_GUESS_PLAN_H_
#define GEMMAKV_ENGINE_GUESS_PLAN_H_

#include <cstddef>
#include <span>
#include <vector>

#include "engine/drafter.h"

namespace gkv {

// What a step's guesses cost.
struct GuessCosts {
  size_t tokens = 1;  // that the step brings without guesses
  // [i]: how much longer it takes with i + 1 guesses, as a share of what it
  // takes without; no more guesses than these.
  std::span<const double> extra = {};
};

// How many of each sequence's guesses the step is to take, from its first on:
// those that bring the most tokens in the time, and none where that is not at
// least 3 % more than without. Rows go where a token is likeliest to come of
// them, of equals to the sequence that came first. Pure.
std::vector<size_t> PlanGuesses(
    std::span<const std::span<const DraftGuess>> guesses,
    const GuessCosts& costs);

// Whether guesses that are certain would bring so much. Pure.
bool CertainGuessesPay(const GuessCosts& costs);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GUESS_PLAN_H_
