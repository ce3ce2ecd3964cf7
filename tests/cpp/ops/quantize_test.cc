#include "ops/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "ops/target.h"

namespace gkv {
namespace {

struct Result {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

Result Quantize(const std::vector<float>& x, size_t stride, size_t rows,
                size_t cols) {
  Result out{std::vector<int8_t>(rows * cols, 99),
             std::vector<float>(rows * cols / kQuantBlock, -1.0f),
             std::vector<int32_t>(rows * cols / kQuantBlock, -1)};
  QuantizeRows(x.data(), stride, rows, cols,
               {out.values.data(), out.scales.data(), out.sums.data()});
  return out;
}

class QuantizeTest : public ::testing::Test {
 protected:
  void TearDown() override { ForceTarget(""); }
  template <typename Fn>
  void OnEveryTarget(const Fn& fn) {
    for (const std::string& name : AttainableTargets()) {
      SCOPED_TRACE(name);
      ForceTarget(name);
      fn();
    }
  }
};

// One value at a time, as the header defines it.
TEST_F(QuantizeTest, MatchesDefinitionExactly) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (const size_t cols : {32u, 64u, 640u}) {
    const size_t rows = 3, stride = cols + 5;
    std::vector<float> x((rows - 1) * stride + cols);
    for (float& value : x) value = normal(rng) * std::exp2(normal(rng) * 20);
    OnEveryTarget([&] {
      const Result out = Quantize(x, stride, rows, cols);
      for (size_t r = 0; r < rows; ++r) {
        for (size_t b = 0; b < cols / kQuantBlock; ++b) {
          const float* block = &x[r * stride + b * kQuantBlock];
          const size_t at = r * (cols / kQuantBlock) + b;
          float max = 0.0f;
          for (size_t i = 0; i < kQuantBlock; ++i) {
            max = std::max(max, std::abs(block[i]));
          }
          ASSERT_EQ(out.scales[at], max / 127.0f);
          const float inverse = 127.0f / max;
          int32_t sum = 0;
          for (size_t i = 0; i < kQuantBlock; ++i) {
            const auto expected =
                static_cast<int32_t>(std::nearbyint(block[i] * inverse));
            ASSERT_EQ(out.values[at * kQuantBlock + i], expected);
            ASSERT_LE(std::abs(expected), 127);
            sum += expected;
          }
          ASSERT_EQ(out.sums[at], sum);
        }
      }
    });
  }
}

// Four blocks are quantized at a time unless one of them needs care.
TEST_F(QuantizeTest, BlocksAreThoseOfEachAlone) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  constexpr size_t kBlocks = 11;
  const float odd[] = {0.0f, 1e-39f, std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN()};
  for (size_t special = 0; special < kBlocks; ++special) {
    std::vector<float> x(kBlocks * kQuantBlock);
    for (float& value : x) value = normal(rng);
    const float value = odd[special % 4];
    float* const block = &x[special * kQuantBlock];
    if (!(value < 1)) {
      block[special] = value;
    } else {
      std::fill_n(block, kQuantBlock, value);
    }
    OnEveryTarget([&] {
      const Result all = Quantize(x, 0, 1, x.size());
      for (size_t b = 0; b < kBlocks; ++b) {
        const std::vector<float> one(&x[b * kQuantBlock],
                                     &x[b * kQuantBlock] + kQuantBlock);
        const Result alone = Quantize(one, 0, 1, kQuantBlock);
        EXPECT_EQ(std::memcmp(&all.scales[b], &alone.scales[0],
                              sizeof(float)), 0);
        EXPECT_EQ(all.sums[b], alone.sums[0]);
        EXPECT_TRUE(std::equal(alone.values.begin(), alone.values.end(),
                               &all.values[b * kQuantBlock]));
      }
    });
  }
}

TEST_F(QuantizeTest, TiesGoToEven) {
  std::vector<float> x(32, 0.0f);
  x[0] = 127.0f;  // the inverse is exactly 1
  for (size_t i = 1; i < 32; ++i) x[i] = static_cast<float>(i) - 16.5f;
  OnEveryTarget([&] {
    const Result out = Quantize(x, 32, 1, 32);
    EXPECT_EQ(out.values[1], -16);  // -15.5
    EXPECT_EQ(out.values[2], -14);  // -14.5
    EXPECT_EQ(out.values[16], 0);   // -0.5
    EXPECT_EQ(out.values[17], 0);   // 0.5
    EXPECT_EQ(out.values[18], 2);   // 1.5
    EXPECT_EQ(out.scales[0], 1.0f);
  });
}

TEST_F(QuantizeTest, ZerosAndTinyBlocksHaveScaleZero) {
  for (const float tiny : {0.0f, -0.0f, 1e-45f, 0x1.fffffep-119f}) {
    const std::vector<float> x(32, tiny);
    OnEveryTarget([&] {
      const Result out = Quantize(x, 32, 1, 32);
      EXPECT_EQ(out.scales[0], 0.0f) << tiny;
      EXPECT_EQ(out.sums[0], 0);
      for (const int8_t value : out.values) EXPECT_EQ(value, 0);
    });
  }
}

TEST_F(QuantizeTest, ExtremeFiniteBlocksStayAccurate) {
  for (const float big : {0x1p-118f, std::numeric_limits<float>::max()}) {
    std::vector<float> x(32, big);
    x[3] = -big;
    OnEveryTarget([&] {
      const Result out = Quantize(x, 32, 1, 32);
      EXPECT_EQ(out.scales[0], big / 127.0f);
      EXPECT_EQ(out.values[0], 127);
      EXPECT_EQ(out.values[3], -127);
      EXPECT_EQ(out.sums[0], 30 * 127);
    });
  }
}

// A bad value spoils its own block and no other.
TEST_F(QuantizeTest, NanAndInfinityGiveNanScale) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {infinity, -infinity, nan, -nan}) {
    for (size_t at = 0; at < 32; ++at) {
      std::vector<float> x(96, 1.0f);
      x[32 + at] = bad;
      OnEveryTarget([&] {
        const Result out = Quantize(x, 96, 1, 96);
        EXPECT_EQ(out.scales[0], 1.0f / 127.0f);
        EXPECT_TRUE(std::isnan(out.scales[1]));
        EXPECT_EQ(out.scales[2], 1.0f / 127.0f);
        EXPECT_EQ(out.sums[1], 0);
        for (size_t i = 32; i < 64; ++i) EXPECT_EQ(out.values[i], 0);
        EXPECT_EQ(out.values[64], 127);
      });
    }
  }
}

TEST_F(QuantizeTest, ErrorIsWhatTheFirstQuantizationLost) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> x(96);
  for (float& value : x) value = normal(rng);
  x[70] = std::numeric_limits<float>::quiet_NaN();
  OnEveryTarget([&] {
    Result first = Quantize(x, 96, 1, 96);
    std::vector<float> error(96);
    QuantizationError(
        x.data(), 96,
        {first.values.data(), first.scales.data(), first.sums.data()},
        error.data());
    for (size_t i = 0; i < 96; ++i) {
      const double exact =
          static_cast<double>(x[i]) -
          static_cast<double>(first.scales[i / 32]) * first.values[i];
      if (i / 32 == 2) {
        EXPECT_TRUE(std::isnan(error[i]));
        continue;
      }
      // Half a step at the most; computed to float precision.
      EXPECT_LE(std::abs(exact), first.scales[i / 32] * 0.5001);
      EXPECT_NEAR(error[i], exact, std::abs(x[i]) * 1.3e-7);
    }
  });
}

}  // namespace
}  // namespace gkv
