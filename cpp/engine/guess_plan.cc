#include "engine/guess_plan.h"

#include <algorithm>

#include "engine/drafter.h"

namespace gkv {
namespace {

// The next guess of a sequence that may be taken.
struct Next {
  double reach;  // how likely it is right, and all before it
  size_t sequence;
};

// How many times the tokens in the time a step brings whose guesses so many
// are likely to be right of, if they cost so much.
double Gain(double right, double extra, const GuessCosts& costs) {
  return (1 + right / static_cast<double>(costs.tokens)) / (1 + extra);
}

bool Later(const Next& a, const Next& b) {
  return a.reach != b.reach ? a.reach < b.reach : a.sequence > b.sequence;
}

}  // namespace

std::vector<size_t> PlanGuesses(
    std::span<const std::span<const DraftGuess>> guesses,
    const GuessCosts& costs) {
  std::vector<size_t> counts(guesses.size(), 0);
  std::vector<Next> heap;
  for (size_t i = 0; i < guesses.size(); ++i) {
    if (!guesses[i].empty()) heap.push_back({guesses[i][0].right, i});
  }
  std::make_heap(heap.begin(), heap.end(), Later);
  std::vector<size_t> best = counts;
  double best_gain = kLeastGain;
  double right = 0;  // expected
  // The likeliest first: the best so many guesses are the first so many.
  for (size_t taken = 0; taken < costs.extra.size() && !heap.empty(); ++taken) {
    std::pop_heap(heap.begin(), heap.end(), Later);
    Next next = heap.back();
    heap.pop_back();
    right += next.reach;
    const size_t count = ++counts[next.sequence];
    const double gain = Gain(right, costs.extra[taken], costs);
    if (gain > best_gain) {
      best_gain = gain;
      best = counts;
    }
    if (count < guesses[next.sequence].size()) {
      next.reach *= guesses[next.sequence][count].right;
      heap.push_back(next);
      std::push_heap(heap.begin(), heap.end(), Later);
    }
  }
  return best;
}

bool CertainGuessesPay(const GuessCosts& costs) {
  for (size_t i = 0; i < costs.extra.size(); ++i) {
    const auto right = static_cast<double>(i + 1);
    if (Gain(right, costs.extra[i], costs) > kLeastGain) return true;
  }
  return false;
}

}  // namespace gkv
