#include "engine/ranking.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gkv {
namespace {

const float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();
const double kAll = std::numeric_limits<double>::infinity();

std::vector<float> Normal(size_t size, uint32_t seed, float deviation) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

// The ids of all that are at least `floor`, in rank.
std::vector<int32_t> Sorted(const std::vector<float>& x, float floor) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] >= floor) ids.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  return ids;
}

// Every prefix by its count, and every token by the mass before it.
void ExpectSorted(Ranking& ranking, const std::vector<float>& x, float floor) {
  const float max = *std::max_element(x.begin(), x.end());
  const Softmax softmax{max, 0.75f};
  ranking.Reset(x, softmax, floor);
  const std::vector<int32_t> ids = Sorted(x, floor);
  ASSERT_EQ(ranking.size(), ids.size());
  std::vector<float> logits(ids.size()), weights(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    logits[i] = x[static_cast<size_t>(ids[i])];
  }
  ExpShifted(logits.data(), max, 0.75f, ids.size(), weights.data());
  double mass = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const double before = mass;
    mass += weights[i];
    const Ranking::Prefix first = ranking.Find(i + 1, kAll);
    ASSERT_EQ(first.count, i + 1);
    ASSERT_EQ(first.last, ids[i]) << "rank " << i;
    ASSERT_EQ(first.mass, mass);
    for (const double wanted : {std::nextafter(before, kAll), mass}) {
      const Ranking::Prefix found = ranking.Find(ids.size(), wanted);
      ASSERT_EQ(found.count, i + 1);
      ASSERT_EQ(found.last, ids[i]);
      ASSERT_EQ(found.mass, mass);
    }
    if (i > 0) {
      ASSERT_EQ(ranking.Find(i, mass).last, ids[i - 1]);
    }
  }
  EXPECT_EQ(ranking.mass(), mass);
  const float middle = weights[weights.size() / 2];
  EXPECT_EQ(ranking.CountFrom(middle),
            static_cast<size_t>(
                std::count_if(weights.begin(), weights.end(),
                              [&](float weight) { return weight >= middle; })));
}

TEST(RankingTest, EqualsSorting) {
  Ranking ranking;  // one for all: nothing of an earlier row may remain
  for (const size_t size : {1500u, 1u, 2u, 17u, 63u, 64u, 65u, 500u}) {
    for (const float deviation : {0.0f, 0.01f, 1.0f, 4.0f}) {
      const std::vector<float> x = Normal(size, 3, deviation);
      const float max = *std::max_element(x.begin(), x.end());
      for (const float below : {0.0f, 0.02f, 3.0f, 12.0f}) {
        ExpectSorted(ranking, x, max - below);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RankingTest, TiesAreInOrderOfTheirIds) {
  std::vector<float> x = Normal(2000, 5, 2);
  for (float& value : x) value = std::round(value);
  Ranking ranking;
  ExpectSorted(ranking, x, -3);
  ExpectSorted(ranking, std::vector<float>(700, -4.5f), -4.5f);
}

TEST(RankingTest, AFarFloorAndANarrowOne) {
  const std::vector<float> x = Normal(800, 6, 2);
  Ranking ranking;
  ExpectSorted(ranking, x, std::numeric_limits<float>::lowest());
  const std::vector<float> huge = {3e38f, -3e38f, 1.0f, 2.0f, 3e38f};
  ranking.Reset(huge, {3e38f, 1.0f}, -kInf);  // the range overflows
  const int32_t order[] = {0, 4, 3, 2, 1};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(ranking.Find(i + 1, kAll).last, order[i]);
  }
  EXPECT_EQ(ranking.Find(5, kAll).mass, 2);
}

TEST(RankingTest, InfinityAndNaN) {
  const std::vector<float> x = {1, kInf, kNaN, -kInf, kInf, 3};
  Ranking ranking;
  ranking.Reset(x, {kInf, 0.5f}, kInf);
  EXPECT_EQ(ranking.size(), 2u);
  EXPECT_EQ(ranking.mass(), 2);
  EXPECT_EQ(ranking.Find(1, kAll).last, 1);
  EXPECT_EQ(ranking.Find(2, kAll).last, 4);
  ranking.Reset(x, {kInf, 0.5f}, -kInf);
  EXPECT_EQ(ranking.size(), 4u);
  EXPECT_EQ(ranking.CountFrom(0.5f), 2u);
  EXPECT_EQ(ranking.Find(4, kAll).mass, 2);
}

}  // namespace
}  // namespace gkv
