#include "engine/guess_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace gkv {
namespace {

using Guesses = std::vector<DraftGuess>;

Guesses WithShares(std::initializer_list<double> shares) {
  Guesses guesses;
  for (const double right : shares) guesses.push_back({1, right});
  return guesses;
}

TEST(GuessPlanTest, CertainGuessesPayWhereTheyBringMoreThanTheyCost) {
  const auto pay = [](size_t tokens, const std::vector<double>& extra) {
    return CertainGuessesPay({tokens, extra});
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
  const std::vector<std::span<const DraftGuess>> spans(guesses.begin(),
                                                       guesses.end());
  return PlanGuesses(spans, {tokens, extra});
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

}  // namespace
}  // namespace gkv
