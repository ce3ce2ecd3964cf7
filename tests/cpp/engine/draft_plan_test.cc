#include "engine/draft_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

namespace gkv {
namespace {

using Counts = std::vector<size_t>;

// Tokens per second by the definition.
double Rate(std::span<const DraftCandidate> candidates, const Counts& counts,
            const DraftCosts& costs) {
  double tokens = static_cast<double>(costs.tokens), seconds = 0;
  size_t guesses = 0, most = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (size_t k = 1; k <= counts[i]; ++k) {
      tokens += std::pow(candidates[i].right, static_cast<double>(k));
    }
    if (counts[i] > 0) seconds += candidates[i].first_cost;
    guesses += counts[i];
    most = std::max(most, counts[i]);
  }
  for (size_t round = 1; round <= most; ++round) {
    const auto members = std::count_if(counts.begin(), counts.end(),
                                       [&](size_t c) { return c >= round; });
    seconds += costs.rounds[static_cast<size_t>(members) - 1];
  }
  const double extra = guesses == 0 ? 0 : costs.extra[guesses - 1];
  return tokens / (seconds + costs.step * (1 + extra));
}

TEST(DraftPlanTest, NothingWhereCostsAreNotKnown) {
  const DraftCandidate sure{0.9, 7};
  const std::array<double, 2> numbers = {0.1, 0.2};
  EXPECT_EQ(PlanDrafts({&sure, 1}, {1, 0, numbers, numbers}).guesses,
            Counts{0});
  EXPECT_EQ(PlanDrafts({&sure, 1}, {1, 1, {}, numbers}).guesses, Counts{0});
  EXPECT_EQ(PlanDrafts({&sure, 1}, {1, 1, numbers, {}}).guesses, Counts{0});
  EXPECT_TRUE(PlanDrafts({}, {1, 1, numbers, numbers}).guesses.empty());
}

TEST(DraftPlanTest, AsManyAsPay) {
  const std::array<double, 15> extra = {0.1, 0.2, 0.3, 0.4, 0.5,
                                        0.6, 0.7, 0.8, 0.9, 1.0,
                                        1.1, 1.2, 1.3, 1.4, 1.5};
  const std::array<double, 2> cheap = {0.01, 0.01}, dear = {1.0, 1.0};
  const DraftCandidate sure{0.99, 15}, some{0.5, 15}, short_one{0.99, 2};
  EXPECT_EQ(PlanDrafts({&sure, 1}, {1, 1, extra, cheap}).guesses, Counts{15});
  const size_t few = PlanDrafts({&some, 1}, {1, 1, extra, cheap}).guesses[0];
  EXPECT_GT(few, 0u);
  EXPECT_LT(few, 5u);
  EXPECT_EQ(PlanDrafts({&short_one, 1}, {1, 1, extra, cheap}).guesses,
            Counts{2});
  // A draft as slow as the model brings nothing.
  const DraftPlan none = PlanDrafts({&some, 1}, {1, 1, extra, dear});
  EXPECT_EQ(none.guesses, Counts{0});
  EXPECT_EQ(none.gain, 1);
  // What comes before the first guess counts.
  const DraftCandidate late{0.99, 15, 20};
  EXPECT_EQ(PlanDrafts({&late, 1}, {1, 1, extra, cheap}).guesses, Counts{0});
  // The likely one is asked, the other is not.
  const std::array<DraftCandidate, 2> two = {DraftCandidate{0.05, 15}, sure};
  const Counts counts = PlanDrafts(two, {2, 1, extra, cheap}).guesses;
  EXPECT_EQ(counts[0], 0u);
  EXPECT_GT(counts[1], 5u);
}

// No plan of all brings more, but for those whose rounds leave one out that is
// likelier.
TEST(DraftPlanTest, NoOtherPlanBringsMuchMore) {
  std::mt19937 rng(3);
  const auto uniform = [&] {
    return std::uniform_real_distribution<double>(0, 1)(rng);
  };
  size_t some = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<DraftCandidate> candidates(1 + rng() % 3);
    for (DraftCandidate& c : candidates) {
      c = {uniform(), rng() % 5, rng() % 2 == 0 ? 0 : 0.1 * uniform()};
    }
    std::vector<double> extra(4 * candidates.size()), rounds;
    double share = 0;
    for (double& e : extra) e = share += 0.15 * uniform();
    double seconds = 0.3 * uniform();
    for (size_t i = 0; i < candidates.size(); ++i) {
      rounds.push_back(seconds += 0.05 * uniform());
    }
    const DraftCosts costs{candidates.size(), 1, extra, rounds};
    const DraftPlan plan = PlanDrafts(candidates, costs);
    const double before = static_cast<double>(candidates.size());
    const double found = Rate(candidates, plan.guesses, costs);
    if (std::ranges::any_of(plan.guesses, [](size_t n) { return n > 0; })) {
      ++some;
      EXPECT_NEAR(found / before, plan.gain, 1e-9);
      EXPECT_GT(plan.gain, 1.03);
    }
    double best = 1.03 * before;
    const size_t n = candidates.size();
    for (size_t code = 0; code < static_cast<size_t>(std::pow(5, n)); ++code) {
      Counts counts;
      for (size_t i = 0, rest = code; i < n; ++i, rest /= 5) {
        counts.push_back(std::min(rest % 5, candidates[i].most));
      }
      best = std::max(best, Rate(candidates, counts, costs));
    }
    EXPECT_GE(std::max(found, 1.03 * before), 0.97 * best) << round;
  }
  EXPECT_GT(some, 100u);
}

}  // namespace
}  // namespace gkv
