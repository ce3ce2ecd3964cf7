#include "ops/logits.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (size_t size = 1; size <= 70; ++size) sizes.push_back(size);
  for (const size_t size : {640u, 4095u, 4096u, 4097u, 4112u, 20000u}) {
    sizes.push_back(size);
  }
  return sizes;
}

std::vector<float> Normal(size_t size, uint32_t seed, float deviation = 4) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

// Many ties, some NaN and infinities.
std::vector<float> Coarse(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<float> x(size);
  for (float& value : x) {
    const auto kind = rng() % 40;
    value = kind == 0   ? kNan
            : kind == 1 ? -kNan
            : kind == 2 ? -kInfinity
                        : static_cast<float>(rng() % 9) - 4.0f;
  }
  return x;
}

// All tokens above -inf in the order of TopK.
std::vector<ScoredToken> Sorted(const std::vector<float>& x) {
  std::vector<ScoredToken> all;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] > -kInfinity) all.push_back({static_cast<int32_t>(i), x[i]});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](auto& a, auto& b) { return a.logit > b.logit; });
  return all;
}

class LogitsTest : public EveryTargetTest {};

TEST_F(LogitsTest, ArgMaxIsTheFirstOfTheLargest) {
  for (const size_t size : Sizes()) {
    for (const std::vector<float>& x : {Normal(size, 1), Coarse(size, 2)}) {
      const std::vector<ScoredToken> sorted = Sorted(x);
      OnEveryTarget([&] {
        const ScoredToken best = ArgMax(x.data(), size);
        if (sorted.empty()) {
          ASSERT_EQ(best.id, -1);
        } else {
          ASSERT_EQ(best.id, sorted[0].id) << size;
          ASSERT_EQ(best.logit, sorted[0].logit);
        }
      });
    }
  }
}

TEST_F(LogitsTest, ArgMaxFindsEachPlace) {
  for (size_t at = 0; at < 150; ++at) {
    std::vector<float> x(150, -2.0f);
    x[at] = -1.0f;
    x[149] = -1.0f;  // a tie with the last
    OnEveryTarget(
        [&] { ASSERT_EQ(ArgMax(x.data(), 150).id, static_cast<int32_t>(at)); });
  }
}

TEST_F(LogitsTest, ArgMaxOfNothing) {
  OnEveryTarget([&] {
    for (const float value : {kNan, -kInfinity}) {
      const std::vector<float> x(37, value);
      const ScoredToken best = ArgMax(x.data(), x.size());
      EXPECT_EQ(best.id, -1);
      EXPECT_EQ(best.logit, -kInfinity);
    }
    EXPECT_EQ(ArgMax(nullptr, 0).id, -1);
  });
}

// Zeros of both signs tie; the logit is the one at the id.
TEST_F(LogitsTest, ArgMaxOfSignedZeros) {
  for (size_t at = 0; at < 40; ++at) {
    std::vector<float> x(40, 0.0f);
    x[0] = -0.0f;
    x[at] = -0.0f;
    OnEveryTarget([&] {
      const ScoredToken best = ArgMax(x.data(), 40);
      ASSERT_EQ(best.id, 0);
      ASSERT_TRUE(std::signbit(best.logit)) << at;
    });
  }
}

TEST_F(LogitsTest, LogSumExpMatchesOracle) {
  for (const size_t size : Sizes()) {
    for (const float shift : {0.0f, 500.0f, -500.0f}) {
      std::vector<float> x = Normal(size, 3);
      for (float& value : x) value += shift;
      if (size > 3) x[1] = kNan, x[2] = -kInfinity;
      double sum = 0;
      for (const float value : x) {
        if (value > -kInfinity) sum += std::exp(double{value} - shift);
      }
      const double expected = std::log(sum) + shift;
      OnEveryTarget([&] {
        ASSERT_NEAR(LogSumExp(x.data(), size), expected,
                    2e-7 * std::abs(expected) + 1e-6)
            << size;
      });
    }
  }
}

TEST_F(LogitsTest, LogSumExpAtTheEdges) {
  OnEveryTarget([&] {
    const auto of = [](std::vector<float> x) {
      return LogSumExp(x.data(), x.size());
    };
    EXPECT_EQ(of({}), -kInfinity);
    EXPECT_EQ(of({kNan, -kInfinity, -kNan}), -kInfinity);
    EXPECT_EQ(of({1.0f, kInfinity, kNan}), kInfinity);
    EXPECT_EQ(of({3.25f}), 3.25f);
    EXPECT_EQ(of({-3e38f, 3e38f}), 3e38f);
    EXPECT_FLOAT_EQ(of(std::vector<float>(262144, 1.0f)),
                    static_cast<float>(1 + std::log(262144.0)));
  });
}

TEST_F(LogitsTest, TokensFromAFloor) {
  for (const size_t size : Sizes()) {
    for (const std::vector<float>& x :
         {Normal(size, 4), Coarse(size, 5), std::vector<float>(size, 2.0f)}) {
      for (const float floor :
           {-kInfinity, -3e38f, 0.0f, 2.0f, 9.0f, 50.0f, kInfinity, kNan}) {
        std::vector<int32_t> ids;
        for (size_t i = 0; i < size; ++i) {
          if (x[i] > -kInfinity && x[i] >= floor) {
            ids.push_back(static_cast<int32_t>(i));
          }
        }
        OnEveryTarget([&] {
          TokenList list{{7}, {7.0f}};  // is replaced
          TokensFrom(x.data(), size, floor, list);
          ASSERT_EQ(list.ids, ids) << size << " from " << floor;
          ASSERT_EQ(list.logits.size(), ids.size());
          for (size_t i = 0; i < ids.size(); ++i) {
            ASSERT_EQ(list.logits[i], x[static_cast<size_t>(ids[i])]);
          }
        });
      }
    }
  }
}

TEST_F(LogitsTest, TheKLargestAreNotBelowTheirFloor) {
  for (const size_t size : {1u, 15u, 16u, 17u, 65u, 3000u, 20000u}) {
    for (const std::vector<float>& x :
         {Normal(size, 8), Coarse(size, 9), std::vector<float>(size, 2.0f)}) {
      const std::vector<ScoredToken> sorted = Sorted(x);
      for (const size_t k : {1u, 2u, 5u, 40u, 64u, 1000u, 99999u}) {
        OnEveryTarget([&] {
          const auto [max, floor] = BoundsOfLargest(x.data(), size, k);
          ASSERT_EQ(max, sorted.empty() ? -kInfinity : sorted[0].logit);
          ASSERT_FALSE(std::isnan(floor));
          if (k > sorted.size()) {
            ASSERT_EQ(floor, -kInfinity);
          } else {
            ASSERT_LE(floor, sorted[k - 1].logit) << k << " of " << size;
          }
        });
      }
    }
  }
}

TEST_F(LogitsTest, FewOthersReachTheFloorOfTheKLargest) {
  const std::vector<float> x = Normal(262144, 10);
  for (const size_t k : {1u, 40u, 300u, 2000u, 8192u}) {
    OnEveryTarget([&] {
      const float floor = BoundsOfLargest(x.data(), x.size(), k).floor;
      const auto above = std::count_if(x.begin(), x.end(),
                                       [&](float v) { return v >= floor; });
      EXPECT_LE(above, static_cast<std::ptrdiff_t>(k + k / 2)) << k;
    });
  }
}

TEST_F(LogitsTest, RankBinsAreInOrderAndEven) {
  for (const size_t size : Sizes()) {
    for (const std::vector<float>& x : {Normal(size, 12), Coarse(size, 13)}) {
      const std::vector<ScoredToken> sorted = Sorted(x);
      if (sorted.empty()) continue;
      const float max = sorted[0].logit;
      for (const float floor : {-kInfinity, -1000.0f, max - 1.5f, max}) {
        const float end =
            std::max(floor, sorted.size() < size ? floor : sorted.back().logit);
        OnEveryTarget([&] {
          std::vector<int32_t> bins(size + 1, -7);
          RankBins(x.data(), size, max, floor, 100, bins.data());
          ASSERT_EQ(bins[size], -7);
          for (size_t i = 0; i < size; ++i) {
            ASSERT_LE(bins[i], 99);
            if (std::isnan(x[i]) || x[i] <= end) {
              ASSERT_GE(bins[i], 98);
            } else if (end > -kInfinity) {
              ASSERT_NEAR(bins[i], 99 * (max - x[i]) / (max - end), 1.001);
            } else {
              ASSERT_EQ(bins[i], 0);  // of an infinite range
            }
          }
          for (size_t i = 1; i < sorted.size(); ++i) {
            ASSERT_LE(bins[static_cast<size_t>(sorted[i - 1].id)],
                      bins[static_cast<size_t>(sorted[i].id)]);
          }
        });
      }
    }
  }
}

TEST_F(LogitsTest, RankBinsOfInfinity) {
  const std::vector<float> x = {kInfinity, 1.0f, kInfinity, kNan, -kInfinity};
  OnEveryTarget([&] {
    std::vector<int32_t> bins(5);
    RankBins(x.data(), 5, kInfinity, 0.0f, 16, bins.data());
    EXPECT_EQ(bins, std::vector<int32_t>(5, 15));
  });
}

TEST_F(LogitsTest, ExpShiftedMatchesOracle) {
  for (const size_t size : Sizes()) {
    const std::vector<float> x = Normal(size, 6);
    const float max = *std::max_element(x.begin(), x.end());
    for (const float factor : {1.0f, 0.5f, 3.0f}) {
      OnEveryTarget([&] {
        std::vector<float> out(size + 1, 7.0f);
        ExpShifted(x.data(), max, factor, size, out.data());
        for (size_t i = 0; i < size; ++i) {
          const double exponent = (double{x[i]} - max) * factor;
          ASSERT_NEAR(out[i], std::exp(exponent),
                      1e-37 + std::exp(exponent) * (2e-7 - 1.2e-7 * exponent))
              << i << " of " << size;
          ASSERT_LE(out[i], 1.0f);
        }
        ASSERT_EQ(out[size], 7.0f);
      });
    }
  }
}

TEST_F(LogitsTest, ExpSumsAreSumsOfExpShifted) {
  for (const size_t size : {1u, 15u, 16u, 1023u, 1024u, 1025u, 5000u}) {
    std::vector<float> x = Normal(size, 77);
    if (size > 20) {
      x[3] = -kInfinity;
      x[7] = kNan;
    }
    const float max = ArgMax(x.data(), size).logit;
    std::vector<float> terms(size);
    OnEveryTarget([&] {
      ExpShifted(x.data(), max, 0.7f, size, terms.data());
      std::vector<double> sums((size + kExpSumPartition - 1) /
                               kExpSumPartition);
      ExpSums(x.data(), max, 0.7f, size, sums.data());
      ASSERT_EQ(sums.size(), (size + 1023) / 1024);
      for (size_t p = 0; p < sums.size(); ++p) {
        double expected = 0;
        for (size_t i = p * 1024; i < std::min(size, (p + 1) * 1024); ++i) {
          expected += terms[i];
        }
        EXPECT_NEAR(sums[p], expected, 1e-6 * expected) << size << " " << p;
      }
    });
  }
}

TEST_F(LogitsTest, MaximaOfGroupsLeaveOutWhatIsNoNumber) {
  std::vector<float> x = Normal(64, 9);
  x[3] = kNan;
  std::fill(x.begin() + 16, x.begin() + 32, kNan);
  std::fill(x.begin() + 32, x.begin() + 48, -kInfinity);
  x[50] = kInfinity;
  float first = -kInfinity;
  for (size_t i = 0; i < 16; ++i) {
    if (i != 3) first = std::max(first, x[i]);
  }
  OnEveryTarget([&] {
    float maxima[4];
    MaximaOfGroups(x.data(), 16, 4, maxima);
    EXPECT_EQ(maxima[0], first);
    EXPECT_EQ(maxima[1], -kInfinity);
    EXPECT_EQ(maxima[2], -kInfinity);
    EXPECT_EQ(maxima[3], kInfinity);
  });
}

TEST_F(LogitsTest, ListsTokensById) {
  std::vector<std::pair<int32_t, float>> tokens = {
      {7, -2.0f}, {-1, 3.0f}, {5, 0.5f}};
  TokenList list{{1}, {1.0f}};
  ListById(tokens, list);
  EXPECT_EQ(list.ids, (std::vector<int32_t>{-1, 5, 7}));
  EXPECT_EQ(list.logits, (std::vector<float>{3.0f, 0.5f, -2.0f}));
}

TEST_F(LogitsTest, TheFloorOfTheLargestIsNotAboveThem) {
  for (const size_t size : {1u, 16u, 100u, 5000u}) {
    std::vector<float> x = Normal(size, 9);
    std::vector<float> sorted = x;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    OnEveryTarget([&] {
      EXPECT_EQ(FloorOfLargest(x.data(), size, 1), sorted[0]);
      for (const size_t k : {2u, 7u, 64u, 200u}) {
        const float floor = FloorOfLargest(x.data(), size, k);
        EXPECT_LE(floor, sorted[std::min(size, k) - 1]);
        // As many values as that has are not much more than asked for.
        const auto kept = std::count_if(x.begin(), x.end(),
                                        [&](float v) { return v >= floor; });
        if (16 * k <= size) {
          EXPECT_LT(kept, static_cast<long>(2 * k + 16));
        }
      }
    });
  }
}

TEST_F(LogitsTest, ExpShiftedAtTheEdges) {
  const std::vector<float> x = {1.0f, kNan, -kInfinity, -3e38f, 0.5f};
  const std::vector<float> infinite = {kInfinity, 1.0f, kInfinity, kNan};
  OnEveryTarget([&] {
    std::vector<float> out(5);
    for (const float factor : {0.0f, 1e-30f, 1.0f, 1e30f, kInfinity}) {
      SCOPED_TRACE(factor);
      ExpShifted(x.data(), 1.0f, factor, 5, out.data());
      EXPECT_EQ(out[0], 1.0f);
      EXPECT_EQ(out[1], 0.0f);
      EXPECT_EQ(out[2], 0.0f);
      EXPECT_GE(out[3], 0.0f);
      EXPECT_LE(out[3], 1.0f);
      EXPECT_LE(out[4], 1.0f);
      ExpShifted(infinite.data(), kInfinity, factor, 4, out.data());
      EXPECT_EQ(out[0], 1.0f);
      EXPECT_EQ(out[1], 0.0f);
      EXPECT_EQ(out[2], 1.0f);
      EXPECT_EQ(out[3], 0.0f);
    }
  });
}

TEST_F(LogitsTest, FusedTargetsAgreeBitForBit) {
  for (const size_t size : Sizes()) {
    const std::vector<float> x = Normal(size, 7);
    const float max = *std::max_element(x.begin(), x.end());
    ExpectSameBits([&] {
      std::vector<float> out(size);
      ExpShifted(x.data(), max, 1.25f, size, out.data());
      out.push_back(LogSumExp(x.data(), size));
      return out;
    });
  }
}

TEST_F(LogitsTest, ExpAgreesAndFallsOverItsWholeRange) {
  std::vector<float> x;
  for (int i = 0; i < 1 << 19; ++i) {
    x.push_back(-static_cast<float>(i) * (110.0f / (1 << 19)));
  }
  ExpectSameBits([&] {
    std::vector<float> out(x.size());
    ExpShifted(x.data(), 0.0f, 1.0f, x.size(), out.data());
    EXPECT_TRUE(std::is_sorted(out.rbegin(), out.rend()));
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(out[i] > 0, x[i] >= -87);
    }
    return out;
  });
}

}  // namespace
}  // namespace gkv
