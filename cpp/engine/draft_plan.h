#ifndef GEMMAKV_ENGINE_DRAFT_PLAN_H_
#define GEMMAKV_ENGINE_DRAFT_PLAN_H_

#include <cstddef>
#include <span>
#include <vector>

namespace gkv {

// A conversation that a draft model may guess for.
struct DraftCandidate {
  double right = 0;       // how likely each guess is, behind right ones
  size_t most = 0;        // guesses at most
  double first_cost = 0;  // seconds before its first guess, besides the round
};

// What the next step costs.
struct DraftCosts {
  size_t tokens = 1;  // that it brings without guesses
  double step = 0;    // seconds of it without guesses
  // [i]: how much longer it takes with i + 1 guesses, as a share of `step`;
  // no more guesses than these.
  std::span<const double> extra = {};
  // [i]: seconds in which a draft model makes a guess for each of i + 1
  // conversations.
  std::span<const double> rounds = {};
};

struct DraftPlan {
  std::vector<size_t> guesses;  // [candidates]
  // Tokens per second, as a multiple of those without guesses: 1 if there are
  // none.
  double gain = 1;
};

// The guesses that bring the most tokens in the time, none where that is not
// at least 3 % more than without. Pure.
//
// Rounds follow each other: a conversation that is left out of one is left out
// of all behind it.
DraftPlan PlanDrafts(std::span<const DraftCandidate> candidates,
                     const DraftCosts& costs);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFT_PLAN_H_
