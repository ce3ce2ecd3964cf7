#ifndef GEMMAKV_ENGINE_GUESS_PLAN_H_
#define GEMMAKV_ENGINE_GUESS_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gkv {

struct DraftGuess {
  int32_t id = 0;    // a token of the model
  double right = 1;  // probability that it is right if all before it are
};

// The costs of the coming step.
struct GuessCosts {
  size_t tokens = 1;  // of a step without guesses
  double step = 0;    // seconds of a step without guesses; 0: not known
  // [i]: how much longer the step takes with i + 1 guesses, as a share of
  // `step`. There are no more guesses than these.
  std::span<const double> extra = {};

  // Further inputs of guessers.
  bool reads_prompts = false;  // the step reads prompts: no model guesses
  size_t read_rows = 128;  // of new tokens that a model may read at a time
  bool always = false;     // guess whether it pays or not
};

// What one request may have guessed: either known guesses, or guesses that a
// model would make in rounds.
struct GuessOffer {
  std::span<const DraftGuess> known = {};

  double right = 0;       // probability of each guess if all before are right
  size_t most = 0;        // the most guesses
  double first_cost = 0;  // seconds before its first guess, besides the round
  // [i]: seconds in which the model makes a guess for each of i + 1 requests.
  // Offers with the same array belong to the same model.
  std::span<const double> rounds = {};
};

struct GuessPlan {
  std::vector<size_t> guesses;  // [offers]: how many of each, from its first on
  // Tokens per second as a multiple of those without guesses; 1 if there are
  // none.
  double gain = 1;
};

// Chooses the guesses that bring the most tokens per second, and none if that
// is not at least 3 % more than without. Pure.
//
// A row goes to the guess that is likeliest to be right; of equals, to the
// request that came first. Rounds of a model follow each other: a request that
// is left out of one is left out of all later ones.
GuessPlan PlanGuesses(std::span<const GuessOffer> offers,
                      const GuessCosts& costs);

// Whether guesses that are certain and cost nothing to make would bring that
// much. Pure.
bool CertainGuessesPay(const GuessCosts& costs);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GUESS_PLAN_H_
