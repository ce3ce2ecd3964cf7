#include "ops/altup.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

constexpr float kEpsilon = 1e-6f;
constexpr float kCanary = 12345.0f;
constexpr size_t kSizes[] = {1, 2, 7, 15, 16, 17, 33, 64, 70, 640, 2048};

std::vector<float> Normal(size_t size, uint32_t seed, float deviation = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

double MeanSquare(const float* x, size_t size) {
  double sum = 0;
  for (size_t i = 0; i < size; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum / static_cast<double>(size);
}

// Streams that lie further apart than they are long, with canaries between.
struct Streams {
  Streams(size_t size, size_t inputs, uint32_t seed)
      : size(size), stride(size + 3), all(inputs * stride, kCanary) {
    for (size_t k = 0; k < inputs; ++k) {
      const std::vector<float> one =
          Normal(size, seed + static_cast<uint32_t>(k));
      std::copy(one.begin(), one.end(), all.begin() + Offset(k));
    }
  }
  std::ptrdiff_t Offset(size_t k) const {
    return static_cast<std::ptrdiff_t>(k * stride);
  }
  void ExpectCanaries() const {
    for (size_t i = 0; i < all.size(); ++i) {
      if (i % stride < size) continue;
      ASSERT_EQ(all[i], kCanary) << i;
    }
  }
  double at(size_t k, size_t i) const { return all[k * stride + i]; }

  size_t size, stride;
  std::vector<float> all;
};

double Dot(const std::vector<float>& coefs, size_t row,
           const std::vector<float>& routes) {
  double sum = 0;
  for (size_t k = 0; k < routes.size(); ++k) {
    sum += static_cast<double>(coefs[row * routes.size() + k]) * routes[k];
  }
  return sum;
}

class AltUpTest : public EveryTargetTest {};

TEST_F(AltUpTest, RoutesAreTheOracles) {
  for (const size_t size : kSizes) {
    for (size_t inputs = 1; inputs <= kMaxAltUpInputs; ++inputs) {
      const std::vector<float> x = Normal(size, 1, 3), norm = Normal(size, 2);
      // Sums from nearly 0 to where tanh bends.
      const std::vector<float> router =
          Normal(inputs * size, 3, std::sqrt(static_cast<float>(size)));
      OnEveryTarget([&] {
        std::vector<float> routes(inputs + 1, kCanary);
        AltUpRoute(x.data(), norm.data(), router.data(), kEpsilon, size, inputs,
                   routes.data());
        const double root = std::sqrt(MeanSquare(x.data(), size) + kEpsilon);
        for (size_t k = 0; k < inputs; ++k) {
          double sum = 0, terms = 0;
          for (size_t i = 0; i < size; ++i) {
            const double term = static_cast<double>(x[i]) * norm[i] *
                                router[k * size + i] / root /
                                static_cast<double>(size);
            sum += term;
            terms += std::abs(term);
          }
          ASSERT_NEAR(routes[k], std::tanh(sum), 1e-6 * terms) << size;
        }
        ASSERT_EQ(routes[inputs], kCanary);
      });
    }
  }
}

TEST_F(AltUpTest, PredictionsAreTheOracles) {
  for (const size_t size : kSizes) {
    for (size_t inputs = 1; inputs <= kMaxAltUpInputs; ++inputs) {
      const Streams before(size, inputs, 10);
      const std::vector<float> coefs = Normal(inputs * inputs * inputs, 5);
      const std::vector<float> routes = Normal(inputs, 6);
      OnEveryTarget([&] {
        Streams after = before;
        AltUpPredict(coefs.data(), routes.data(), size, inputs, after.stride,
                     after.all.data());
        after.ExpectCanaries();
        for (size_t j = 0; j < inputs; ++j) {
          for (size_t i = 0; i < size; ++i) {
            double expected = before.at(j, i), terms = std::abs(expected);
            for (size_t k = 0; k < inputs; ++k) {
              const double term =
                  Dot(coefs, j * inputs + k, routes) * before.at(k, i);
              expected += term;
              terms += std::abs(term) + 1;
            }
            ASSERT_NEAR(after.at(j, i), expected, 2e-6 * terms);
          }
        }
      });
    }
  }
}

TEST_F(AltUpTest, CorrectionsAreTheOracles) {
  for (const size_t size : kSizes) {
    for (size_t active = 0; active < 4; ++active) {
      constexpr size_t kInputs = 4;
      const Streams before(size, kInputs, 20);
      const std::vector<float> coefs = Normal(kInputs * kInputs, 7);
      const std::vector<float> routes = Normal(kInputs, 8);
      const std::vector<float> activated = Normal(size, 9, 2);
      OnEveryTarget([&] {
        Streams after = before;
        AltUpCorrect(coefs.data(), routes.data(), activated.data(), size,
                     kInputs, active, after.stride, after.all.data());
        after.ExpectCanaries();
        for (size_t k = 0; k < kInputs; ++k) {
          const double factor = 1 + Dot(coefs, k, routes);
          for (size_t i = 0; i < size; ++i) {
            const double change = activated[i] - before.at(active, i);
            ASSERT_NEAR(after.at(k, i), before.at(k, i) + factor * change,
                        3e-6 * (1 + std::abs(before.at(k, i)) +
                                std::abs(factor * change) + std::abs(change)));
          }
        }
      });
    }
  }
}

TEST_F(AltUpTest, MagnitudesMatch) {
  for (const size_t size : kSizes) {
    const std::vector<float> like = Normal(size, 11, 5);
    OnEveryTarget([&] {
      std::vector<float> x = Normal(size, 12, 0.3f);
      const std::vector<float> before = x;
      MatchRms(like.data(), size, x.data());
      const double least = std::max(MeanSquare(before.data(), size), 1e-5);
      const double factor =
          std::sqrt(MeanSquare(like.data(), size)) / std::sqrt(least);
      for (size_t i = 0; i < size; ++i) {
        ASSERT_NEAR(x[i], before[i] * factor, 2e-6 * std::abs(x[i]));
      }
    });
  }
}

TEST_F(AltUpTest, SmallMagnitudesDoNotGrowWithoutBound) {
  const std::vector<float> like(40, 2.0f);
  OnEveryTarget([&] {
    std::vector<float> small(40, 1e-4f), zeros(40, 0.0f), nan(40, 1.0f);
    MatchRms(like.data(), 40, small.data());
    MatchRms(like.data(), 40, zeros.data());
    for (size_t i = 0; i < 40; ++i) {
      ASSERT_NEAR(small[i], 2e-4 / std::sqrt(1e-5), 1e-6);
      ASSERT_EQ(zeros[i], 0.0f);
    }
    nan[13] = std::numeric_limits<float>::quiet_NaN();
    MatchRms(like.data(), 40, nan.data());
    ASSERT_TRUE(std::isnan(nan[13]));
    ASSERT_TRUE(std::isnan(nan[39]));
  });
}

TEST_F(AltUpTest, FusedTargetsAgreeBitForBit) {
  for (const size_t size : kSizes) {
    for (size_t inputs = 2; inputs <= kMaxAltUpInputs; ++inputs) {
      ExpectSameBits([&] {
        Streams streams(size, inputs, 30);
        const std::vector<float> norm = Normal(size, 31);
        const std::vector<float> router = Normal(inputs * size, 32, 9);
        const std::vector<float> predict =
            Normal(inputs * inputs * inputs, 33);
        const std::vector<float> correct = Normal(inputs * inputs, 34);
        const std::vector<float> layer = Normal(size, 35);
        std::vector<float> routes(inputs);
        AltUpRoute(streams.all.data(), norm.data(), router.data(), kEpsilon,
                   size, inputs, routes.data());
        AltUpPredict(predict.data(), routes.data(), size, inputs,
                     streams.stride, streams.all.data());
        AltUpRoute(layer.data(), norm.data(), router.data(), kEpsilon, size,
                   inputs, routes.data());
        AltUpCorrect(correct.data(), routes.data(), layer.data(), size, inputs,
                     inputs - 1, streams.stride, streams.all.data());
        MatchRms(layer.data(), size, streams.all.data());
        streams.all.insert(streams.all.end(), routes.begin(), routes.end());
        return streams.all;
      });
    }
  }
}

}  // namespace
}  // namespace gkv
