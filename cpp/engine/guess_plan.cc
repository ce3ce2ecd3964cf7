#include "engine/guess_plan.h"

#include <algorithm>

namespace gkv {
namespace {

// The least gain for which guesses are made: costs are measured, and vary.
constexpr double kLeastGain = 1.03;

// Returns the tokens per second of a step with so many guesses as a multiple of
// those without. `right`: the expected number of right guesses; `seconds`: the
// time in which models make them.
double Gain(size_t guesses, double right, double seconds,
            const GuessCosts& costs) {
  const double more = costs.extra[guesses - 1] + seconds / costs.step;
  return (1 + right / static_cast<double>(costs.tokens)) / (1 + more);
}

class GuessPlanner {
 public:
  GuessPlanner(std::span<const GuessOffer> offers, const GuessCosts& costs)
      : offers_(offers), costs_(costs), best_{Counts(offers.size(), 0), 1} {}

  GuessPlan Plan() {
    std::vector<size_t> order, asked;
    for (size_t i = 0; i < offers_.size(); ++i) {
      const auto same = [&](const GuessOffer& offer) {
        return offer.rounds.data() == offers_[i].rounds.data();
      };
      models_.push_back(static_cast<size_t>(
          std::ranges::find_if(offers_, same) - offers_.begin()));
      if (!offers_[i].known.empty()) {
        order.push_back(i);
      } else if (offers_[i].most > 0 && !offers_[i].rounds.empty()) {
        asked.push_back(i);
      }
    }
    Try(order);
    // Of the offers of models, the best number is taken: first those of the
    // quickest model, of these the likeliest.
    std::ranges::stable_sort(asked, [&](size_t a, size_t b) {
      const double time_a = offers_[a].rounds[0], time_b = offers_[b].rounds[0];
      return time_a != time_b ? time_a < time_b
                              : offers_[a].right > offers_[b].right;
    });
    for (const size_t i : asked) {
      order.push_back(i);
      Try(order);
    }
    return best_;
  }

 private:
  using Counts = std::vector<size_t>;

  // Takes guesses of these offers one by one, each time the one with which the
  // step brings most. Keeps the best number of them if it is the best plan so
  // far.
  void Try(std::span<const size_t> order) {
    Counts counts(offers_.size(), 0);
    // probability that all so far are right
    std::vector<double> reach(offers_.size(), 1);
    // [model, round]: the number of offers that take part.
    Counts members(offers_.size() * (costs_.extra.size() + 1), 0);
    const auto members_of = [&](size_t i) -> size_t& {
      return members[models_[i] * (costs_.extra.size() + 1) + counts[i]];
    };
    double right = 0, seconds = 0;
    for (size_t guesses = 1; guesses <= costs_.extra.size(); ++guesses) {
      double gain = 0, next_right = 0, next_seconds = 0;
      size_t next = 0;
      for (const size_t i : order) {
        const GuessOffer& offer = offers_[i];
        const bool known = !offer.known.empty();
        double more_right = right, more_seconds = seconds;
        if (known) {
          if (counts[i] == offer.known.size()) continue;
          more_right += reach[i] * offer.known[counts[i]].right;
        } else {
          const size_t others = members_of(i);
          if (counts[i] == offer.most || others == offer.rounds.size()) {
            continue;
          }
          more_right += reach[i] * offer.right;
          more_seconds += offer.rounds[others];
          if (others > 0) more_seconds -= offer.rounds[others - 1];
          if (counts[i] == 0) more_seconds += offer.first_cost;
        }
        const double with = Gain(guesses, more_right, more_seconds, costs_);
        if (with <= gain) continue;
        gain = with;
        next = i;
        next_right = more_right;
        next_seconds = more_seconds;
      }
      if (gain == 0) return;
      reach[next] = next_right - right;
      right = next_right;
      seconds = next_seconds;
      ++members_of(next);
      ++counts[next];
      if (gain > std::max(best_.gain, kLeastGain)) best_ = {counts, gain};
    }
  }

  const std::span<const GuessOffer> offers_;
  const GuessCosts& costs_;
  Counts models_;  // of each offer: the first offer of the same model
  GuessPlan best_;
};

}  // namespace

GuessPlan PlanGuesses(std::span<const GuessOffer> offers,
                      const GuessCosts& costs) {
  if (costs.step <= 0) return {std::vector<size_t>(offers.size(), 0), 1};
  return GuessPlanner(offers, costs).Plan();
}

bool CertainGuessesPay(const GuessCosts& costs) {
  for (size_t n = 1; n <= costs.extra.size(); ++n) {
    if (Gain(n, static_cast<double>(n), 0, costs) > kLeastGain) return true;
  }
  return false;
}

}  // namespace gkv
