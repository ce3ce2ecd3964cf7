#include "ops/rope.h"

#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

// Half a unit in the last place of a float below 1, and what the oracle itself
// may be wrong by at the last position.
constexpr double kTolerance = 0x1p-25 + 1e-13;

// Angles in extended precision: rounding the frequency to double would be an
// error of 1e-11 already.
void ExpectMatches(double base, double factor, size_t head_dim,
                   const std::vector<size_t>& positions) {
  RopeTable table(base, factor, head_dim);
  table.Reserve(positions.back() + 1);
  const size_t half = head_dim / 2;
  std::vector<float> cos(half), sin(half);
  for (const size_t position : positions) {
    table.CosSin(position, cos.data(), sin.data());
    for (size_t i = 0; i < half; ++i) {
      const long double exponent = -2.0L * static_cast<long double>(i) /
                                   static_cast<long double>(head_dim);
      const long double angle =
          static_cast<long double>(position) / factor *
          std::pow(static_cast<long double>(base), exponent);
      ASSERT_NEAR(cos[i], static_cast<double>(std::cos(angle)), kTolerance)
          << "position " << position << ", pair " << i;
      ASSERT_NEAR(sin[i], static_cast<double>(std::sin(angle)), kTolerance)
          << "position " << position << ", pair " << i;
    }
  }
}

std::vector<size_t> Positions() {
  std::vector<size_t> positions;
  for (size_t p = 0; p < 600; ++p) positions.push_back(p);
  for (size_t p = 600; p < 131072; p += 997) positions.push_back(p);
  for (const size_t p : {1023u, 1024u, 65535u, 65536u, 131070u, 131071u}) {
    positions.push_back(p);
  }
  return positions;
}

TEST(RopeTableTest, MatchesExtendedPrecision) {
  for (const double base : {1e4, 1e6}) {
    for (const double factor : {1.0, 8.0}) {
      for (const size_t head_dim : {64u, 128u, 256u}) {
        SCOPED_TRACE(testing::Message() << "base " << base << ", factor "
                                        << factor << ", dim " << head_dim);
        ExpectMatches(base, factor, head_dim, Positions());
      }
    }
  }
}

TEST(RopeTableTest, UnusualShapes) {
  ExpectMatches(1.5, 1.0, 2, {0});
  ExpectMatches(10.0, 3.0, 6, {0, 1, 255, 256});
  ExpectMatches(5e5, 1.0, 96, {0, 1, 17, 299});
}

TEST(RopeTableTest, PositionZeroIsTheIdentity) {
  const RopeTable table(1e4, 1.0, 256);
  std::vector<float> cos(128), sin(128);
  table.CosSin(0, cos.data(), sin.data());
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(cos[i], 1.0f);
    EXPECT_EQ(sin[i], 0.0f);
  }
}

// A conversation grows past what the table had, however it got there.
TEST(RopeTableTest, BitsDoNotDependOnTheSizeOfTheTable) {
  RopeTable large(1e6, 1.0, 256), growing(1e6, 1.0, 256);
  large.Reserve(131072);
  std::vector<float> cos[2], sin[2];
  for (int i = 0; i < 2; ++i) cos[i].resize(128), sin[i].resize(128);
  for (const size_t positions : {1u, 257u, 513u, 4000u, 70001u}) {
    growing.Reserve(positions);
    ASSERT_GE(growing.positions(), positions);
    for (size_t p = 0; p < growing.positions(); p += 1 + p / 512) {
      growing.CosSin(p, cos[0].data(), sin[0].data());
      large.CosSin(p, cos[1].data(), sin[1].data());
      ASSERT_EQ(cos[0], cos[1]) << p << " of " << positions;
      ASSERT_EQ(sin[0], sin[1]) << p << " of " << positions;
    }
  }
}

TEST(RopeTableTest, BitsDoNotDependOnWhoMakesIt) {
  const auto made = [] {
    RopeTable table(1e6, 8.0, 256);
    table.Reserve(5000);
    return table;
  };
  const RopeTable expected = made();
  const RopeTable found = [&] {
    const OddFpEnvironment odd;
    return made();
  }();
  std::vector<float> cos[2], sin[2];
  for (int i = 0; i < 2; ++i) cos[i].resize(128), sin[i].resize(128);
  for (size_t p = 0; p < 5000; ++p) {
    expected.CosSin(p, cos[0].data(), sin[0].data());
    found.CosSin(p, cos[1].data(), sin[1].data());
    ASSERT_EQ(cos[0], cos[1]) << p;
    ASSERT_EQ(sin[0], sin[1]) << p;
  }
}

// The others keep the frequencies that they have without.
TEST(RopeTableTest, LastPairsMayStandStill) {
  const RopeTable all(1e6, 1.0, 64), some(1e6, 1.0, 64, 24);
  for (const size_t position : {0, 1, 255, 256}) {
    if (position >= all.positions()) break;
    std::vector<float> cos(32), sin(32), some_cos(32), some_sin(32);
    all.CosSin(position, cos.data(), sin.data());
    some.CosSin(position, some_cos.data(), some_sin.data());
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(some_cos[i], i < 8 ? cos[i] : 1.0f) << position << ", " << i;
      EXPECT_EQ(some_sin[i], i < 8 ? sin[i] : 0.0f) << position << ", " << i;
    }
  }
}

TEST(RopeTableTest, GrowsToWhatIsUsed) {
  RopeTable table(1e4, 1.0, 64);
  const size_t least = table.positions();
  table.Reserve(least);
  EXPECT_EQ(table.positions(), least);
  table.Reserve(least + 1);
  EXPECT_EQ(table.positions(), 2 * least);
  table.Reserve(100 * least - 1);
  EXPECT_EQ(table.positions(), 100 * least);
}

TEST(RopeTableTest, RefusesWhatItCannotCompute) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THROW(RopeTable(1e4, 1, 0), InvalidArgument);
  EXPECT_THROW(RopeTable(1e4, 1, 63), InvalidArgument);
  EXPECT_THROW(RopeTable(1e4, 1, 64, 33), InvalidArgument);
  for (const double base : {1.0, 0.0, -2.0, nan, infinity}) {
    EXPECT_THROW(RopeTable(base, 1, 64), InvalidArgument) << base;
  }
  for (const double factor : {0.99, 0.0, -1.0, nan, infinity}) {
    EXPECT_THROW(RopeTable(1e4, factor, 64), InvalidArgument) << factor;
  }
}

}  // namespace
}  // namespace gkv
