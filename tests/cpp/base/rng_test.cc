#include "base/rng.h"

#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace gkv {
namespace {

// The first row is a known answer of Philox-4x32-10 (its reference
// implementation prints 6627e8d5 e169c58d for zero counter and key); the
// others are from an independent implementation. A changed value would change
// every seeded generation.
TEST(RngTest, GoldenValues) {
  EXPECT_EQ(UniformAt(0, 0), 0x1.989fa35785a70p-2);
  EXPECT_EQ(UniformAt(1, 0), 0x1.c7d00ce1ca141p-1);
  EXPECT_EQ(UniformAt(0, 1), 0x1.f1c99948b9640p-1);
  EXPECT_EQ(UniformAt(42, 7), 0x1.6ef60ec5a1e12p-2);
  EXPECT_EQ(UniformAt(0xDEADBEEF12345678u, 0x0123456789ABCDEFu),
            0x1.31df14b70b17ep-1);
  EXPECT_EQ(UniformAt(UINT64_MAX, UINT64_MAX), 0x1.34635f490c2b0p-2);
}

TEST(RngTest, EveryBitOfSeedAndCounterMatters) {
  std::set<double> draws{UniformAt(5, 9)};
  for (int bit = 0; bit < 64; ++bit) {
    draws.insert(UniformAt(5 ^ uint64_t{1} << bit, 9));
    draws.insert(UniformAt(5, 9 ^ uint64_t{1} << bit));
  }
  EXPECT_EQ(draws.size(), 129u);
}

void ExpectUniform(const std::vector<double>& draws) {
  constexpr size_t kBuckets = 256;
  std::vector<size_t> buckets(kBuckets);
  double sum = 0;
  for (const double draw : draws) {
    ASSERT_GE(draw, 0.0);
    ASSERT_LT(draw, 1.0);
    ++buckets[static_cast<size_t>(draw * kBuckets)];
    sum += draw;
  }
  const double n = static_cast<double>(draws.size());
  EXPECT_NEAR(sum / n, 0.5, 5 / std::sqrt(12 * n));
  double chi_square = 0;
  for (const size_t count : buckets) {
    const double error = static_cast<double>(count) - n / kBuckets;
    chi_square += error * error / (n / kBuckets);
  }
  // 255 degrees of freedom: mean 255, standard deviation 22.6.
  EXPECT_NEAR(chi_square, 255, 5 * 22.6);
}

TEST(RngTest, UniformOverCounters) {
  std::vector<double> draws;
  for (uint64_t i = 0; i < 100000; ++i) draws.push_back(UniformAt(1, i));
  ExpectUniform(draws);
}

TEST(RngTest, UniformOverSeeds) {
  std::vector<double> draws;
  for (uint64_t i = 0; i < 100000; ++i) draws.push_back(UniformAt(i, 3));
  ExpectUniform(draws);
}

TEST(RngTest, NeighboursAreUncorrelated) {
  constexpr uint64_t kDraws = 100000;
  double across_counters = 0;
  double across_seeds = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double draw = UniformAt(i, i) - 0.5;
    across_counters += draw * (UniformAt(i, i + 1) - 0.5);
    across_seeds += draw * (UniformAt(i + 1, i) - 0.5);
  }
  // Each product has variance 1/144.
  const double bound = 5 * std::sqrt(static_cast<double>(kDraws)) / 12;
  EXPECT_NEAR(across_counters, 0, bound);
  EXPECT_NEAR(across_seeds, 0, bound);
}

TEST(RngTest, LowBitsAreRandomToo) {
  int ones = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    ones += static_cast<int>(std::fmod(UniformAt(2, i) * 0x1p53, 2.0));
  }
  EXPECT_NEAR(ones, 5000, 5 * 50);
}

TEST(RngTest, SeedsOfTheSystemDiffer) {
  std::set<uint64_t> seeds;
  for (int i = 0; i < 100; ++i) seeds.insert(RandomSeed());
  EXPECT_EQ(seeds.size(), 100u);
}

}  // namespace
}  // namespace gkv
