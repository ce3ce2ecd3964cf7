#include "engine/draft_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine/drafter.h"

namespace gkv {
namespace {

class Planner {
 public:
  Planner(std::span<const DraftCandidate> candidates, const DraftCosts& costs)
      : candidates_(candidates), costs_(costs) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].most > 0) order_.push_back(i);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
      return candidates[a].right > candidates[b].right;
    });
    before_ = static_cast<double>(costs.tokens) / costs.step;
    best_.guesses.assign(candidates.size(), 0);
    best_.gain = kLeastGain;
  }

  DraftPlan Plan() {
    for (size_t first = 1; first <= order_.size(); ++first) TryFrom(first);
    const bool any = std::any_of(best_.guesses.begin(), best_.guesses.end(),
                                 [](size_t count) { return count > 0; });
    if (!any) best_.gain = 1;
    return std::move(best_);
  }

 private:
  // Of one way to spend the time so far.
  struct Sum {
    double tokens = 0;
    double draft_seconds = 0;
    size_t guesses = 0;
  };

  double Gain(const Sum& sum) const {
    const double share = sum.guesses == 0 ? 0 : costs_.extra[sum.guesses - 1];
    const double seconds = costs_.step * (1 + share) + sum.draft_seconds;
    return (static_cast<double>(costs_.tokens) + sum.tokens) / seconds /
           before_;
  }

  // The likeliest `first` conversations in the first round, and of those in
  // each later one as many as are best then.
  void TryFrom(size_t first) {
    std::vector<size_t> members(
        order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(first));
    std::vector<size_t> counts(candidates_.size(), 0);
    std::vector<double> reach(candidates_.size(), 1);  // all were right so far
    Sum sum;
    for (const size_t i : members) {
      sum.draft_seconds += candidates_[i].first_cost;
    }
    for (size_t round = 1;; ++round) {
      std::erase_if(members, [&](size_t i) {
        return candidates_[i].most < round;
      });
      Sum next = sum, best_sum;
      size_t best_count = 0;
      double best_gain = 0;
      for (size_t count = 1; count <= members.size(); ++count) {
        if (next.guesses >= costs_.extra.size() ||
            count > costs_.rounds.size()) {
          break;
        }
        const size_t i = members[count - 1];
        next.tokens += reach[i] * candidates_[i].right;
        ++next.guesses;
        if (round == 1 && count < first) continue;
        Sum whole = next;
        whole.draft_seconds += costs_.rounds[count - 1];
        if (Gain(whole) > best_gain) {
          best_gain = Gain(whole);
          best_sum = whole;
          best_count = count;
        }
      }
      if (best_count == 0) return;
      members.resize(best_count);
      sum = best_sum;
      for (const size_t i : members) {
        reach[i] *= candidates_[i].right;
        counts[i] = round;
      }
      if (best_gain > best_.gain) {
        best_.gain = best_gain;
        best_.guesses = counts;
      }
    }
  }

  const std::span<const DraftCandidate> candidates_;
  const DraftCosts& costs_;
  std::vector<size_t> order_;  // the likeliest first
  double before_;              // tokens per second
  DraftPlan best_;
};

}  // namespace

DraftPlan PlanDrafts(std::span<const DraftCandidate> candidates,
                     const DraftCosts& costs) {
  if (costs.step <= 0 || costs.extra.empty() || costs.rounds.empty()) {
    return {std::vector<size_t>(candidates.size(), 0), 1};
  }
  return Planner(candidates, costs).Plan();
}

}  // namespace gkv
