#include "engine/guess_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace gkv {
namespace {

using Counts = std::vector<size_t>;
using Guesses = std::vector<DraftGuess>;

Guesses WithShares(std::initializer_list<double> shares) {
  Guesses guesses;
  for (const double right : shares) guesses.push_back({1, right});
  return guesses;
}

TEST(GuessPlanTest, CertainGuessesPayWhereTheyBringMoreThanTheyCost) {
  const auto pay = [](size_t tokens, const std::vector<double>& extra) {
    return CertainGuessesPay({tokens, 1, extra});
  };
  EXPECT_FALSE(pay(1, {}));
  EXPECT_TRUE(pay(1, {0.2}));
  EXPECT_FALSE(pay(1, {0.98}));  // not the 3 % more
  EXPECT_TRUE(pay(1, {0.98, 0.99}));
  EXPECT_FALSE(pay(8, {0.125, 0.25, 0.375}));
  EXPECT_TRUE(pay(8, {0.125, 0.25, 0.3}));
}

std::vector<size_t> Plan(const std::vector<Guesses>& guesses, size_t tokens,
                         const std::vector<double>& extra) {
  std::vector<GuessOffer> offers;
  for (const Guesses& one : guesses) offers.push_back({.known = one});
  return PlanGuesses(offers, {tokens, 1, extra}).guesses;
}

double GainOf(const std::vector<Guesses>& guesses,
              const std::vector<size_t>& counts, size_t tokens,
              const std::vector<double>& extra) {
  double right = 0;
  size_t rows = 0;
  for (size_t i = 0; i < guesses.size(); ++i) {
    double reach = 1;
    for (size_t k = 0; k < counts[i]; ++k) right += reach *= guesses[i][k].right;
    rows += counts[i];
  }
  return (1 + right / static_cast<double>(tokens)) /
         (1 + (rows == 0 ? 0 : extra[rows - 1]));
}

TEST(GuessPlanTest, NoneWhereTheyCostMoreThanTheyBring) {
  const Guesses sure = WithShares({1, 1, 1});
  EXPECT_EQ(Plan({sure}, 1, {}), (std::vector<size_t>{0}));
  EXPECT_EQ(Plan({sure}, 1, {1, 2, 3}), (std::vector<size_t>{0}));
  EXPECT_EQ(Plan({sure}, 1, {0.98, 1.95, 2.9}), (std::vector<size_t>{0}))
      << "a gain of less than 3 %";
  EXPECT_EQ(Plan({sure}, 1, {0.5, 1, 1.5}), (std::vector<size_t>{3}));
  EXPECT_EQ(Plan({sure}, 16, {0.05, 0.1, 0.2}), (std::vector<size_t>{0}));
  EXPECT_EQ(Plan({{}, {}}, 2, {0.1}), (std::vector<size_t>{0, 0}));
  EXPECT_EQ(Plan({}, 2, {0.1}), (std::vector<size_t>{}));
}

TEST(GuessPlanTest, RowsGoWhereATokenIsLikeliestToCome) {
  const std::vector<double> extra = {0.1, 0.2, 0.3, 0.4};
  EXPECT_EQ(Plan({WithShares({0.3, 0.3}), WithShares({0.9, 0.9, 0.9, 0.9})}, 2,
                 extra),
            (std::vector<size_t>{0, 4}));
  EXPECT_EQ(Plan({WithShares({0.9, 0.2}), WithShares({0.8, 0.9})}, 2, extra),
            (std::vector<size_t>{1, 2}));
  EXPECT_EQ(Plan({WithShares({0.9}), WithShares({0.9})}, 2, {0.1}),
            (std::vector<size_t>{1, 0}))
      << "of equals the one that came first";
}

TEST(GuessPlanTest, NoOtherWayBringsMore) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<double> share(0, 1);
  for (int round = 0; round < 300; ++round) {
    std::vector<Guesses> guesses(1 + rng() % 3);
    for (Guesses& one : guesses) {
      one.resize(rng() % 4);
      for (DraftGuess& guess : one) guess.right = share(rng);
    }
    std::vector<double> extra(rng() % 7);
    double sum = 0;
    for (double& e : extra) e = sum += share(rng) / 3;
    const size_t tokens = guesses.size() + rng() % 3;
    const std::vector<size_t> found = Plan(guesses, tokens, extra);
    double best = 1.03;
    std::vector<size_t> counts(guesses.size(), 0);
    for (size_t code = 0; code < 64; ++code) {
      size_t rows = 0;
      bool possible = true;
      for (size_t i = 0; i < guesses.size(); ++i) {
        rows += counts[i] = code >> (2 * i) & 3;
        possible = possible && counts[i] <= guesses[i].size();
      }
      if (!possible || rows > extra.size()) continue;
      best = std::max(best, GainOf(guesses, counts, tokens, extra));
    }
    size_t rows = 0;
    for (const size_t count : found) rows += count;
    const double gain = GainOf(guesses, found, tokens, extra);
    if (rows == 0) {
      EXPECT_NEAR(best, 1.03, 1e-12);
    } else {
      EXPECT_NEAR(gain, best, 1e-12);
    }
  }
}

// ---- Guesses that models would make ----

// Tokens per second by the definition.
double Rate(std::span<const GuessOffer> offers, const Counts& counts,
            const GuessCosts& costs) {
  double tokens = static_cast<double>(costs.tokens), seconds = 0;
  size_t guesses = 0, most = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    for (size_t k = 1; k <= counts[i]; ++k) {
      tokens += std::pow(offers[i].right, static_cast<double>(k));
    }
    if (counts[i] > 0) seconds += offers[i].first_cost;
    guesses += counts[i];
    most = std::max(most, counts[i]);
  }
  for (size_t round = 1; round <= most; ++round) {
    const auto members = std::count_if(counts.begin(), counts.end(),
                                       [&](size_t c) { return c >= round; });
    seconds += offers[0].rounds[static_cast<size_t>(members) - 1];
  }
  const double extra = guesses == 0 ? 0 : costs.extra[guesses - 1];
  return tokens / (seconds + costs.step * (1 + extra));
}

GuessOffer Likely(double right, size_t most, std::span<const double> rounds,
                  double first_cost = 0) {
  return {.right = right,
          .most = most,
          .first_cost = first_cost,
          .rounds = rounds};
}

TEST(GuessPlanTest, NothingWhereCostsAreNotKnown) {
  const std::array<double, 2> numbers = {0.1, 0.2};
  const GuessOffer sure = Likely(0.9, 7, numbers);
  const GuessOffer no_rounds = Likely(0.9, 7, {});
  EXPECT_EQ(PlanGuesses({&sure, 1}, {1, 0, numbers}).guesses, Counts{0});
  EXPECT_EQ(PlanGuesses({&sure, 1}, {1, 1, {}}).guesses, Counts{0});
  EXPECT_EQ(PlanGuesses({&no_rounds, 1}, {1, 1, numbers}).guesses, Counts{0});
  EXPECT_TRUE(PlanGuesses({}, {1, 1, numbers}).guesses.empty());
}

TEST(GuessPlanTest, AModelMakesAsManyAsPay) {
  const std::array<double, 15> extra = {0.1, 0.2, 0.3, 0.4, 0.5,
                                        0.6, 0.7, 0.8, 0.9, 1.0,
                                        1.1, 1.2, 1.3, 1.4, 1.5};
  const std::array<double, 2> cheap = {0.01, 0.01}, dear = {1.0, 1.0};
  const auto plan = [&](const GuessOffer& offer) {
    return PlanGuesses({&offer, 1}, {1, 1, extra});
  };
  EXPECT_EQ(plan(Likely(0.99, 15, cheap)).guesses, Counts{15});
  const size_t few = plan(Likely(0.5, 15, cheap)).guesses[0];
  EXPECT_GT(few, 0u);
  EXPECT_LT(few, 5u);
  EXPECT_EQ(plan(Likely(0.99, 2, cheap)).guesses, Counts{2});
  // A draft as slow as the model brings nothing.
  const GuessPlan none = plan(Likely(0.5, 15, dear));
  EXPECT_EQ(none.guesses, Counts{0});
  EXPECT_EQ(none.gain, 1);
  // What comes before the first guess counts.
  EXPECT_EQ(plan(Likely(0.99, 15, cheap, 20)).guesses, Counts{0});
  // The likely one is asked, the other is not.
  const std::array<GuessOffer, 2> two = {Likely(0.05, 15, cheap),
                                         Likely(0.99, 15, cheap)};
  const Counts counts = PlanGuesses(two, {2, 1, extra}).guesses;
  EXPECT_EQ(counts[0], 0u);
  EXPECT_GT(counts[1], 5u);
}

// Those that are there cost less than those that are to be made, and those of
// a quick model less than those of a slow one: one plan weighs all.
TEST(GuessPlanTest, OnePlanForAllKinds) {
  const std::array<double, 3> extra = {0.1, 0.2, 0.3};
  const std::array<double, 1> quick = {0.15}, slow = {0.3};
  const Guesses known = WithShares({0.8, 0.8, 0.8});
  const GuessOffer there{.known = known};
  const auto plan = [&](std::vector<GuessOffer> offers) {
    return PlanGuesses(offers, {offers.size(), 1, extra}).guesses;
  };
  EXPECT_EQ(plan({there, Likely(0.8, 3, slow)}), (Counts{3, 0}));
  EXPECT_EQ(plan({there, Likely(0.99, 3, quick)}), (Counts{2, 1}));
  EXPECT_EQ(plan({Likely(0.9, 3, slow), Likely(0.9, 3, quick)})[0], 0u);
  EXPECT_GT(plan({Likely(0.9, 3, slow), Likely(0.9, 3, quick)})[1], 0u);
}

// No plan of all brings more, but for those whose rounds leave one out that is
// likelier.
TEST(GuessPlanTest, NoOtherPlanBringsMuchMore) {
  std::mt19937 rng(3);
  const auto uniform = [&] {
    return std::uniform_real_distribution<double>(0, 1)(rng);
  };
  size_t some = 0;
  for (int round = 0; round < 300; ++round) {
    const size_t n = 1 + rng() % 3;
    std::vector<double> rounds(n);
    std::vector<GuessOffer> offers;
    for (size_t i = 0; i < n; ++i) {
      const double right = uniform();
      const size_t most = rng() % 5;
      offers.push_back(
          Likely(right, most, rounds, rng() % 2 == 0 ? 0 : 0.1 * uniform()));
    }
    std::vector<double> extra(4 * n);
    double share = 0;
    for (double& e : extra) e = share += 0.15 * uniform();
    double seconds = 0.3 * uniform();
    for (double& r : rounds) r = seconds += 0.05 * uniform();
    const GuessCosts costs{n, 1, extra};
    const GuessPlan plan = PlanGuesses(offers, costs);
    const auto before = static_cast<double>(n);
    const double found = Rate(offers, plan.guesses, costs);
    if (std::ranges::any_of(plan.guesses, [](size_t n) { return n > 0; })) {
      ++some;
      EXPECT_NEAR(found / before, plan.gain, 1e-9);
      EXPECT_GT(plan.gain, 1.03);
    }
    double best = 1.03 * before;
    for (size_t code = 0; code < static_cast<size_t>(std::pow(5, n)); ++code) {
      Counts counts;
      for (size_t i = 0, rest = code; i < n; ++i, rest /= 5) {
        counts.push_back(std::min(rest % 5, offers[i].most));
      }
      best = std::max(best, Rate(offers, counts, costs));
    }
    EXPECT_GE(std::max(found, 1.03 * before), 0.97 * best) << round;
  }
  EXPECT_GT(some, 100u);
}

}  // namespace
}  // namespace gkv
