#ifndef GEMMAKV_ENGINE_GUESS_PLAN_H_
#define GEMMAKV_ENGINE_GUESS_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gkv {

struct DraftGuess {
  int32_t id = 0;    // one of the model's
  double right = 1;  // how likely it is right, after guesses that are
};

// What the coming step costs.
struct GuessCosts {
  size_t tokens = 1;  // that it brings without guesses
  double step = 0;    // seconds of it without guesses; 0: not known
  // [i]: how much longer it takes with i + 1 guesses, as a share of `step`; no
  // more guesses than these.
  std::span<const double> extra = {};

  // What else those that guess for the step go by.
  bool reads_prompts = false;  // it does, too: models make nothing meanwhile
  size_t read_rows = 128;  // that a model may read at a time of what it missed
  bool always = false;     // guess whether it pays or not
};

// What one request may have guessed: either guesses that are there, or some
// that a model would make in rounds.
struct GuessOffer {
  std::span<const DraftGuess> known = {};

  double right = 0;       // how likely each guess is, after right ones
  size_t most = 0;        // guesses at most
  double first_cost = 0;  // seconds before its first guess, besides the round
  // [i]: seconds in which the model makes a guess for each of i + 1 requests.
  // Offers with the same array are of the same model.
  std::span<const double> rounds = {};
};

struct GuessPlan {
  std::vector<size_t> guesses;  // [offers], from the first one of each on
  // Tokens per second, as a multiple of those without guesses: 1 if there are
  // none.
  double gain = 1;
};

// Chooses the guesses that bring the most tokens in the time, and none where
// that is not at least 3 % more than without. Pure.
//
// Rows go where a token is likeliest to come of them, of equals to the request
// that came first. Rounds of a model follow each other: a request that is left
// out of one is left out of all later ones.
GuessPlan PlanGuesses(std::span<const GuessOffer> offers,
                      const GuessCosts& costs);

// Whether guesses that are certain, and there, would bring so much. Pure.
bool CertainGuessesPay(const GuessCosts& costs);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GUESS_PLAN_H_
