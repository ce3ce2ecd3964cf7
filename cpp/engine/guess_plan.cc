#include "engine/guess_plan.h"

#include <algorithm>
#include <utility>

namespace gkv {
namespace {

// Guesses have to bring at least so many times the tokens that come without:
// costs are measured, and vary.
constexpr double kLeastGain = 1.03;

// One way to spend the time.
struct Sum {
  double tokens = 0;  // that come of guesses
  double draft_seconds = 0;
  size_t guesses = 0;
};

double Gain(const Sum& sum, const GuessCosts& costs) {
  const double share = sum.guesses == 0 ? 0 : costs.extra[sum.guesses - 1];
  return (1 + sum.tokens / static_cast<double>(costs.tokens)) /
         (1 + share + sum.draft_seconds / costs.step);
}

class Planner {
 public:
  Planner(std::span<const GuessOffer> offers, const GuessCosts& costs)
      : offers_(offers), costs_(costs), counts_(offers.size(), 0) {
    OrderKnown();
    Take({}, counts_);
  }

  GuessPlan Plan() {
    for (const auto& rounds : Models()) AskModel(rounds);
    for (size_t i = 0; i < known_; ++i) ++counts_[order_[i].offer];
    return {std::move(counts_), best_gain_ > kLeastGain ? best_gain_ : 1};
  }

 private:
  // The next guess of an offer that is there.
  struct Known {
    double reach;  // how likely it is right, and all before it
    size_t offer;
  };
  static bool Later(const Known& a, const Known& b) {
    return a.reach != b.reach ? a.reach < b.reach : a.offer > b.offer;
  }

  // The likeliest first: the best so many guesses are the first so many.
  void OrderKnown() {
    std::vector<Known> heap;
    for (size_t i = 0; i < offers_.size(); ++i) {
      const auto& known = offers_[i].known;
      if (!known.empty()) heap.push_back({known[0].right, i});
    }
    std::make_heap(heap.begin(), heap.end(), Later);
    std::vector<size_t> taken(offers_.size(), 0);
    while (order_.size() < costs_.extra.size() && !heap.empty()) {
      std::pop_heap(heap.begin(), heap.end(), Later);
      Known& next = heap.back();
      order_.push_back(next);
      const auto& known = offers_[next.offer].known;
      const size_t count = ++taken[next.offer];
      if (count == known.size()) {
        heap.pop_back();
        continue;
      }
      next.reach *= known[count].right;
      std::push_heap(heap.begin(), heap.end(), Later);
    }
  }

  // How much `sum` brings with the best number of known guesses beside it.
  double WithKnown(Sum sum, size_t& known) const {
    known = 0;
    double best = Gain(sum, costs_);
    const size_t room = costs_.extra.size() - sum.guesses;
    for (size_t i = 0; i < std::min(room, order_.size()); ++i) {
      sum.tokens += order_[i].reach;
      ++sum.guesses;
      const double gain = Gain(sum, costs_);
      if (gain <= best) continue;
      best = gain;
      known = i + 1;
    }
    return best;
  }

  // Takes this way if it is the best so far. Returns what it brings.
  double Take(const Sum& sum, const std::vector<size_t>& counts) {
    size_t known;
    const double gain = WithKnown(sum, known);
    if (gain > best_gain_) {
      best_gain_ = gain;
      best_ = sum;
      counts_ = counts;
      known_ = known;
    }
    return gain;
  }

  // The rounds of each model, the quickest first.
  std::vector<std::span<const double>> Models() const {
    std::vector<std::span<const double>> models;
    for (const GuessOffer& offer : offers_) {
      const auto same = [&](const auto& rounds) {
        return rounds.data() == offer.rounds.data();
      };
      if (!offer.rounds.empty() && std::ranges::none_of(models, same)) {
        models.push_back(offer.rounds);
      }
    }
    std::ranges::stable_sort(models, {}, [](const auto& m) { return m[0]; });
    return models;
  }

  // Plans the rounds of a model, beside what is planned.
  void AskModel(std::span<const double> rounds) {
    std::vector<size_t> order;  // the likeliest first
    for (size_t i = 0; i < offers_.size(); ++i) {
      if (offers_[i].rounds.data() == rounds.data() && offers_[i].most > 0) {
        order.push_back(i);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return offers_[a].right > offers_[b].right;
    });
    const Sum before = best_;
    const std::vector<size_t> counts = counts_;
    for (size_t first = 1; first <= order.size(); ++first) {
      TryFrom({order.begin(), order.begin() + static_cast<ptrdiff_t>(first)},
              rounds, before, counts);
    }
  }

  // All of `members` in the first round, and of those in each later one as many
  // as are best then.
  void TryFrom(std::vector<size_t> members, std::span<const double> rounds,
               Sum sum, std::vector<size_t> counts) {
    const size_t first = members.size();
    std::vector<double> reach(offers_.size(), 1);  // all were right so far
    for (const size_t i : members) sum.draft_seconds += offers_[i].first_cost;
    for (size_t round = 1;; ++round) {
      std::erase_if(members,
                    [&](size_t i) { return offers_[i].most < round; });
      Sum next = sum, best_sum;
      size_t best_count = 0;
      double best_gain = 0;
      for (size_t count = 1; count <= members.size(); ++count) {
        if (next.guesses >= costs_.extra.size() || count > rounds.size()) break;
        const size_t i = members[count - 1];
        next.tokens += reach[i] * offers_[i].right;
        ++next.guesses;
        if (round == 1 && count < first) continue;
        Sum whole = next;
        whole.draft_seconds += rounds[count - 1];
        size_t known;
        const double gain = WithKnown(whole, known);
        if (gain > best_gain) {
          best_gain = gain;
          best_sum = whole;
          best_count = count;
        }
      }
      if (best_count == 0) return;
      members.resize(best_count);
      sum = best_sum;
      for (const size_t i : members) {
        reach[i] *= offers_[i].right;
        counts[i] = round;
      }
      Take(sum, counts);
    }
  }

  const std::span<const GuessOffer> offers_;
  const GuessCosts& costs_;
  std::vector<Known> order_;  // guesses that are there
  // The best way so far.
  Sum best_;                    // what models make of it
  std::vector<size_t> counts_;  // and of whom
  size_t known_ = 0;            // so many of order_
  double best_gain_ = kLeastGain;
};

}  // namespace

GuessPlan PlanGuesses(std::span<const GuessOffer> offers,
                      const GuessCosts& costs) {
  if (costs.step <= 0 || costs.extra.empty()) {
    return {std::vector<size_t>(offers.size(), 0), 1};
  }
  return Planner(offers, costs).Plan();
}

bool CertainGuessesPay(const GuessCosts& costs) {
  for (size_t i = 0; i < costs.extra.size(); ++i) {
    const Sum sum{.tokens = static_cast<double>(i + 1), .guesses = i + 1};
    if (Gain(sum, costs) > kLeastGain) return true;
  }
  return false;
}

}  // namespace gkv
