#include "ops/elementwise.h"

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kEpsilon = 1e-6f;

std::vector<size_t> Sizes() {
  std::vector<size_t> sizes;
  for (size_t size = 1; size <= 70; ++size) sizes.push_back(size);
  sizes.push_back(640);
  sizes.push_back(2048);
  return sizes;
}

std::vector<float> Normal(size_t size, uint32_t seed, float deviation = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

// The operations as functions of two vectors; the result is `size` long.
using Operation = std::function<void(const float* a, const float* b,
                                     size_t size, float* out)>;

struct Case {
  const char* name;
  Operation run;
  Operation in_place;  // out holds a on entry
  std::function<std::vector<double>(const std::vector<float>&,
                                    const std::vector<float>&)>
      oracle;
  double relative;  // tolerance
  bool mixes;       // every element of a enters every result
};

double InverseRms(const std::vector<float>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return 1 / std::sqrt(sum / static_cast<double>(x.size()) + kEpsilon);
}

template <typename Fn>
auto Each(const Fn& fn) {
  return [fn](const std::vector<float>& a, const std::vector<float>& b) {
    std::vector<double> out(a.size());
    for (size_t i = 0; i < a.size(); ++i) out[i] = fn(a[i], b[i]);
    return out;
  };
}

double GeluArgument(double x) {
  return std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
}

// 0.5 (1 + tanh(u)) as the logistic function of 2 u: the sum would lose all
// digits where tanh is near -1.
double Gelu(double x) { return x / (1 + std::exp(-2 * GeluArgument(x))); }

std::vector<double> SoftmaxOf(const std::vector<float>& a,
                              const std::vector<float>&) {
  double sum = 0;
  std::vector<double> out;
  for (const double v : a) sum += std::exp(v);
  for (const double v : a) out.push_back(std::exp(v) / sum);
  return out;
}

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = {
      {"RmsNorm",
       [](auto* a, auto* b, size_t n, float* out) {
         RmsNorm(a, b, kEpsilon, n, out);
       },
       [](auto*, auto* b, size_t n, float* out) {
         RmsNorm(out, b, kEpsilon, n, out);
       },
       [](const std::vector<float>& a, const std::vector<float>& b) {
         std::vector<double> out(a.size());
         const double scale = InverseRms(a);
         for (size_t i = 0; i < a.size(); ++i) out[i] = a[i] * scale * b[i];
         return out;
       },
       3e-6, true},
      {"Add",
       [](auto* a, auto* b, size_t n, float* out) {
         std::copy(a, a + n, out);
         Add(b, n, out);
       },
       [](auto*, auto* b, size_t n, float* out) { Add(b, n, out); },
       Each([](double a, double b) { return a + b; }), 6e-8, false},
      {"Multiply",
       [](auto* a, auto* b, size_t n, float* out) {
         std::copy(a, a + n, out);
         Multiply(b, n, out);
       },
       [](auto*, auto* b, size_t n, float* out) { Multiply(b, n, out); },
       Each([](double a, double b) { return a * b; }), 6e-8, false},
      {"Scale",
       [](auto* a, auto*, size_t n, float* out) {
         std::copy(a, a + n, out);
         Scale(25.298221f, n, out);
       },
       [](auto*, auto*, size_t n, float* out) { Scale(25.298221f, n, out); },
       Each([](double a, double) { return a * 25.298221f; }), 6e-8, false},
      {"GeluMul",
       [](auto* a, auto* b, size_t n, float* out) { GeluMul(a, b, n, out); },
       [](auto*, auto* b, size_t n, float* out) { GeluMul(out, b, n, out); },
       Each([](double a, double b) { return Gelu(a) * b; }), 8e-6, false},
      {"SoftCap",
       [](auto* a, auto*, size_t n, float* out) {
         std::copy(a, a + n, out);
         SoftCap(3.0f, n, out);
       },
       [](auto*, auto*, size_t n, float* out) { SoftCap(3.0f, n, out); },
       Each([](double a, double) { return 3 * std::tanh(a / 3); }), 6e-7,
       false},
      {"Softmax",
       [](auto* a, auto*, size_t n, float* out) {
         std::copy(a, a + n, out);
         Softmax(n, out);
       },
       [](auto*, auto*, size_t n, float* out) { Softmax(n, out); },
       SoftmaxOf, 3e-6, true},
  };
  return cases;
}

class ElementwiseTest : public EveryTargetTest {};

TEST_F(ElementwiseTest, MatchesOracleAtEverySize) {
  constexpr float kCanary = 12345.0f;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    for (const size_t size : Sizes()) {
      SCOPED_TRACE(size);
      const std::vector<float> a = Normal(size, 1, 2), b = Normal(size, 2);
      const std::vector<double> expected = c.oracle(a, b);
      OnEveryTarget([&] {
        // Neither input nor output aligned, at three offsets.
        for (const size_t offset : {0, 1, 7}) {
          std::vector<float> in(offset);
          in.insert(in.end(), a.begin(), a.end());
          std::vector<float> out(offset + 1 + size + 3, kCanary);
          c.run(in.data() + offset, b.data(), size, out.data() + offset + 1);
          for (size_t i = 0; i < size; ++i) {
            ASSERT_NEAR(out[offset + 1 + i], expected[i],
                        c.relative * std::abs(expected[i]))
                << "element " << i << ", offset " << offset;
          }
          for (size_t i = 0; i < 3; ++i) {
            ASSERT_EQ(out[offset + 1 + size + i], kCanary) << "past the end";
          }
        }
      });
    }
  }
}

TEST_F(ElementwiseTest, InPlaceGivesTheSameBits) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    for (const size_t size : {1u, 15u, 33u, 70u, 640u}) {
      const std::vector<float> a = Normal(size, 3), b = Normal(size, 4);
      OnEveryTarget([&] {
        std::vector<float> apart(size), in_place = a;
        c.run(a.data(), b.data(), size, apart.data());
        c.in_place(nullptr, b.data(), size, in_place.data());
        ASSERT_EQ(Bits(apart), Bits(in_place)) << size;
      });
    }
  }
}

TEST_F(ElementwiseTest, FusedTargetsAgreeBitForBit) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    for (const size_t size : Sizes()) {
      const std::vector<float> a = Normal(size, 5, 3), b = Normal(size, 6);
      ExpectSameBits([&] {
        std::vector<float> out(size);
        c.run(a.data(), b.data(), size, out.data());
        return out;
      });
    }
  }
}

// An element's result does not depend on where in the vector it lies.
TEST_F(ElementwiseTest, ResultsDoNotDependOnTheLane) {
  const std::vector<float> a = Normal(67, 7, 3), b = Normal(67, 8);
  for (const Case& c : Cases()) {
    if (c.mixes) continue;
    SCOPED_TRACE(c.name);
    OnEveryTarget([&] {
      std::vector<float> together(67), alone(67);
      c.run(a.data(), b.data(), 67, together.data());
      for (size_t i = 0; i < 67; ++i) c.run(&a[i], &b[i], 1, &alone[i]);
      ASSERT_EQ(Bits(together), Bits(alone));
    });
  }
}

// The deviation is that of the values themselves: of a sample of n, with n - 1
// beneath the sum of squares, the threshold lies 3% higher at 16 values.
TEST_F(ElementwiseTest, GaussianTopKKeepsWhatLiesAboveTheThreshold) {
  for (const size_t size : Sizes()) {
    for (const float cutoff : {1.6448534f, 0.0f, -0.5f}) {
      std::vector<float> x = Normal(size, 11, 3);
      for (float& value : x) value += 5;
      double mean = 0, squares = 0;
      const auto n = static_cast<double>(size);
      for (const double v : x) mean += v / n;
      for (const double v : x) squares += (v - mean) * (v - mean) / n;
      const double least = mean + cutoff * std::sqrt(squares);
      OnEveryTarget([&] {
        std::vector<float> out = x;
        out.push_back(12345.0f);
        GaussianTopK(cutoff, size, out.data());
        ASSERT_EQ(out[size], 12345.0f);
        for (size_t i = 0; i < size; ++i) {
          ASSERT_NEAR(out[i], std::max(0.0, x[i] - least), 2e-5) << size;
        }
      });
      ExpectSameBits([&] {
        std::vector<float> out = x;
        GaussianTopK(cutoff, size, out.data());
        return out;
      });
    }
  }
  OnEveryTarget([] {
    std::vector<float> x = Normal(37, 12);
    x[20] = kNan;
    GaussianTopK(1, 37, x.data());
    for (const float value : x) ASSERT_TRUE(std::isnan(value));
  });
}

// Every exponent of float, so that the exponential meets all its branches.
TEST_F(ElementwiseTest, TranscendentalsAgreeOverAllExponents) {
  std::mt19937 rng(9);
  std::vector<float> x;
  for (int i = 0; i < 1 << 18; ++i) {
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng())));
    x.push_back(static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-25f);
  }
  const std::vector<float> ones(x.size(), 1.0f);
  ExpectSameBits([&] {
    std::vector<float> out(x.size());
    GeluMul(x.data(), ones.data(), x.size(), out.data());
    return out;
  });
  ExpectSameBits([&] {
    std::vector<float> out = x;
    SoftCap(30.0f, out.size(), out.data());
    return out;
  });
}

TEST_F(ElementwiseTest, GeluKeepsItsDigitsFarFromZero) {
  for (double x = -14; x <= 60; x += 1.0 / 64) {
    const auto gate = static_cast<float>(x);
    const double expected = Gelu(x);
    const double by_tanh = 0.5 * x * (1 + std::tanh(GeluArgument(x)));
    ASSERT_NEAR(expected, by_tanh, 1e-15 * std::max(1.0, std::abs(x)));
    OnEveryTarget([&] {
      float out = 0;
      const float one = 1.0f;
      GeluMul(&gate, &one, 1, &out);
      const double digits_lost = 2 + 2 * std::abs(GeluArgument(x));
      ASSERT_NEAR(out, expected,
                  3e-7 * std::abs(expected) * digits_lost + 1e-36)
          << x;
    });
  }
}

TEST_F(ElementwiseTest, ExtremeValues) {
  OnEveryTarget([&] {
    const std::vector<float> gate = {kInfinity, -1e4f, 1e30f, -0.0f};
    const std::vector<float> ones(4, 1.0f);
    std::vector<float> out(4);
    GeluMul(gate.data(), ones.data(), 4, out.data());
    EXPECT_EQ(out[0], kInfinity);
    EXPECT_NEAR(out[1], 0.0f, 1e-33f);
    EXPECT_EQ(out[2], 1e30f);
    EXPECT_EQ(out[3], 0.0f);
    std::vector<float> x = {kInfinity, -kInfinity, 1e30f, -1e30f, 1e-30f};
    SoftCap(30.0f, 5, x.data());
    EXPECT_EQ(x[0], 30.0f);
    EXPECT_EQ(x[1], -30.0f);
    EXPECT_EQ(x[2], 30.0f);
    EXPECT_EQ(x[3], -30.0f);
    EXPECT_NEAR(x[4], 1e-30f, 1e-36f);
    // A row of zeros: epsilon keeps the norm finite.
    std::vector<float> zeros(20, 0.0f);
    RmsNorm(zeros.data(), zeros.data(), kEpsilon, 20, zeros.data());
    for (const float value : zeros) EXPECT_EQ(value, 0.0f);
  });
}

TEST_F(ElementwiseTest, NanStaysVisible) {
  constexpr size_t kSize = 37;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    for (const float nan : {kNan, -kNan}) {
      for (size_t at = 0; at < kSize; ++at) {
        std::vector<float> a(kSize, 1.0f), b(kSize, 1.0f);
        a[at] = nan;
        OnEveryTarget([&] {
          std::vector<float> out(kSize);
          c.run(a.data(), b.data(), kSize, out.data());
          for (size_t i = 0; i < kSize; ++i) {
            ASSERT_EQ(std::isnan(out[i]), c.mixes || i == at) << i;
          }
        });
      }
    }
  }
  std::vector<float> a(kSize, 1.0f), b(kSize, 1.0f), out(kSize);
  b[35] = kNan;  // up, weight, residual
  OnEveryTarget([&] {
    GeluMul(a.data(), b.data(), kSize, out.data());
    EXPECT_TRUE(std::isnan(out[35]));
    RmsNorm(a.data(), b.data(), kEpsilon, kSize, out.data());
    EXPECT_TRUE(std::isnan(out[35]));
    EXPECT_FALSE(std::isnan(out[34]));
    Add(b.data(), kSize, out.data());
    EXPECT_TRUE(std::isnan(out[35]));
  });
}

// One fused operation more than RmsNorm and Add, so not their bits.
TEST_F(ElementwiseTest, AddRmsNormMatchesOracle) {
  for (const size_t size : Sizes()) {
    const std::vector<float> y = Normal(size, 10, 5), weight = Normal(size, 11);
    const std::vector<float> x = Normal(size, 12, 100);
    const double scale = InverseRms(y);
    OnEveryTarget([&] {
      std::vector<float> out = x;
      AddRmsNorm(y.data(), weight.data(), kEpsilon, size, out.data());
      for (size_t i = 0; i < size; ++i) {
        const double added = static_cast<double>(y[i]) * scale * weight[i];
        const double expected = x[i] + added;
        ASSERT_NEAR(out[i], expected,
                    3e-6 * std::abs(added) + 6e-8 * std::abs(expected))
            << i << " of " << size;
      }
    });
    ExpectSameBits([&] {
      std::vector<float> out = x;
      AddRmsNorm(y.data(), weight.data(), kEpsilon, size, out.data());
      return out;
    });
  }
}

TEST_F(ElementwiseTest, AddScaledMatchesOracle) {
  for (const size_t size : Sizes()) {
    const std::vector<float> y = Normal(size, 13, 5), x = Normal(size, 14, 9);
    OnEveryTarget([&] {
      std::vector<float> out = x;
      AddScaled(0.37f, y.data(), size, out.data());
      for (size_t i = 0; i < size; ++i) {
        const double added = static_cast<double>(y[i]) * double{0.37f};
        ASSERT_NEAR(out[i], x[i] + added,
                    6e-8 * (std::abs(added) + std::abs(x[i] + added)))
            << i << " of " << size;
      }
    });
    ExpectSameBits([&] {
      std::vector<float> out = x;
      AddScaled(0.37f, y.data(), size, out.data());
      return out;
    });
  }
}

// Scores far beyond what the exponential can hold.
TEST_F(ElementwiseTest, SoftmaxOfExtremeScores) {
  OnEveryTarget([&] {
    std::vector<float> x = {1e30f, -1e30f, 1e30f, 0};
    Softmax(4, x.data());
    EXPECT_EQ(x, (std::vector<float>{0.5f, 0, 0.5f, 0}));
    std::vector<float> one = {-300};
    Softmax(1, one.data());
    EXPECT_EQ(one[0], 1.0f);
  });
}

TEST_F(ElementwiseTest, RotateMatchesOracle) {
  for (size_t half = 1; half <= 130; ++half) {
    const size_t size = 2 * half;
    const std::vector<float> x = Normal(size, 13);
    std::vector<float> cos(half), sin(half);
    for (size_t i = 0; i < half; ++i) {
      cos[i] = std::cos(static_cast<float>(i) * 0.37f);
      sin[i] = std::sin(static_cast<float>(i) * 0.37f);
    }
    const auto run = [&] {
      std::vector<float> out = x;
      Rotate(cos.data(), sin.data(), size, out.data());
      return out;
    };
    OnEveryTarget([&] {
      const std::vector<float> out = run();
      for (size_t i = 0; i < half; ++i) {
        const double a = x[i], b = x[half + i], c = cos[i], s = sin[i];
        const double tolerance = 1.2e-7 * (std::abs(a) + std::abs(b));
        ASSERT_NEAR(out[i], a * c - b * s, tolerance) << i;
        ASSERT_NEAR(out[half + i], b * c + a * s, tolerance) << i;
      }
    });
    ExpectSameBits(run);
  }
}

TEST_F(ElementwiseTest, RotateBySingularAnglesIsExact) {
  const std::vector<float> x = Normal(64, 14);
  OnEveryTarget([&] {
    std::vector<float> out = x;
    const std::vector<float> ones(32, 1.0f), zeros(32, 0.0f);
    Rotate(ones.data(), zeros.data(), 64, out.data());
    EXPECT_EQ(out, x);
    Rotate(zeros.data(), ones.data(), 64, out.data());  // a quarter turn
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(out[i], -x[32 + i]);
      EXPECT_EQ(out[32 + i], x[i]);
    }
  });
}

}  // namespace
}  // namespace gkv
