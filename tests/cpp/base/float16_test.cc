#include "base/float16.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace gkv {
namespace {

// The definition of binary16, in arithmetic instead of bit moves.
double Float16Value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = (bits & 1023) / 1024.0;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, -14);
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return sign * std::ldexp(1 + fraction, exponent - 15);
}

TEST(Float16Test, EveryFloat16IsExact) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float found = Float32FromFloat16(static_cast<uint16_t>(bits));
    const double expected = Float16Value(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << bits;
    } else {
      ASSERT_EQ(found, expected) << bits;
      ASSERT_EQ(std::signbit(found), (bits & 0x8000) != 0) << bits;
    }
  }
}

TEST(Float16Test, EveryFloat16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Float32FromFloat16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(Float32FromFloat16(Float16FromFloat32(value))));
    } else {
      ASSERT_EQ(Float16FromFloat32(value), bits);
    }
  }
}

// Around each midpoint of two neighbours, zero and infinity included.
TEST(Float16Test, Float16RoundsToTheNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const double low = Float16Value(static_cast<uint16_t>(bits));
    const double high = bits == 0x7BFF
                            ? 65536.0
                            : Float16Value(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const uint32_t even = bits & 1 ? bits + 1 : bits;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      ASSERT_EQ(Float16FromFloat32(s * middle), sign | even) << bits;
      ASSERT_EQ(Float16FromFloat32(s * std::nextafter(middle, 0.0f)),
                sign | bits);
      ASSERT_EQ(Float16FromFloat32(s * std::nextafter(middle, 1e9f)),
                sign | (bits + 1));
    }
  }
  EXPECT_EQ(Float16FromFloat32(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(Float16FromFloat32(-std::numeric_limits<float>::infinity()),
            0xFC00);
  EXPECT_EQ(Float16FromFloat32(1e-45f), 0);
}

TEST(Float16Test, EveryBFloat16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Float32FromBFloat16(static_cast<uint16_t>(bits));
    ASSERT_EQ(std::bit_cast<uint32_t>(value), bits << 16);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(Float32FromBFloat16(BFloat16FromFloat32(value))));
    } else {
      ASSERT_EQ(BFloat16FromFloat32(value), bits);
    }
  }
}

TEST(Float16Test, BFloat16RoundsToTheNearestAndTiesToEven) {
  EXPECT_EQ(BFloat16FromFloat32(1.0f), 0x3F80);
  EXPECT_EQ(BFloat16FromFloat32(1.0f + 0x1p-8f), 0x3F80);  // tie: down to even
  EXPECT_EQ(BFloat16FromFloat32(1.0f + 3 * 0x1p-8f), 0x3F82);  // tie: up
  EXPECT_EQ(BFloat16FromFloat32(1.0f + 0x1p-8f + 0x1p-23f), 0x3F81);
  EXPECT_EQ(BFloat16FromFloat32(1.0f + 3 * 0x1p-8f - 0x1p-23f), 0x3F81);
  EXPECT_EQ(BFloat16FromFloat32(-1.0f - 3 * 0x1p-8f), 0xBF82);
  EXPECT_EQ(BFloat16FromFloat32(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(BFloat16FromFloat32(std::numeric_limits<float>::lowest()), 0xFF80);
  EXPECT_EQ(BFloat16FromFloat32(0x1p-149f), 0x0000);
  EXPECT_EQ(BFloat16FromFloat32(-0.0f), 0x8000);
}

TEST(Float16Test, BFloat16IsNeverFartherThanItsNeighbours) {
  std::mt19937 rng(1);
  for (int i = 0; i < 100000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    if (!(std::fabs(value) < 0x1p127f)) continue;
    const uint16_t bits = BFloat16FromFloat32(value);
    const double error = std::fabs(double{Float32FromBFloat16(bits)} - value);
    for (const int step : {-1, 1}) {
      const auto next = static_cast<uint16_t>(bits + step);
      const double other = std::fabs(double{Float32FromBFloat16(next)} - value);
      if (std::isnan(other)) continue;
      ASSERT_LE(error, other) << value;
    }
  }
}

// A NaN whose payload is only in the bits that are cut off.
TEST(Float16Test, NaNWithALowPayloadStaysNaN) {
  const float value = std::bit_cast<float>(0x7F800001u);
  EXPECT_TRUE(std::isnan(Float32FromBFloat16(BFloat16FromFloat32(value))));
  const float all = std::bit_cast<float>(0xFFFFFFFFu);
  EXPECT_TRUE(std::isnan(Float32FromBFloat16(BFloat16FromFloat32(all))));
}

}  // namespace
}  // namespace gkv
