#include "ops/double_double.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"

namespace gkv {
namespace {

// The identities that define the operations, which need no wider type.
TEST(DoubleDoubleTest, SumsAndProductsOfDoublesAreExact) {
  std::mt19937_64 rng(1);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 10000; ++i) {
    const double a = normal(rng), b = normal(rng) * std::exp(normal(rng) * 9);
    const DoubleDouble sum = ExactSum(a, b);
    EXPECT_EQ(sum.high, a + b);
    const double larger = std::abs(a) > std::abs(b) ? a : b;
    EXPECT_EQ(sum.low, (a + b - larger - (larger == a ? b : a)) * -1);
    const DoubleDouble product = ExactProduct(a, b);
    EXPECT_EQ(product.high, a * b);
    EXPECT_EQ(product.low, std::fma(a, b, -(a * b)));
  }
}

TEST(DoubleDoubleTest, HoldsMoreThanADouble) {
  const DoubleDouble tiny = 0x1p-100;
  EXPECT_EQ(((DoubleDouble(1) + tiny) - 1).high, 0x1p-100);
  const DoubleDouble x = DoubleDouble(1) + 0x1p-60;
  const DoubleDouble square = x * x - 1;  // 2^-59 + 2^-120
  EXPECT_EQ(square.high, 0x1p-59);
}

TEST(DoubleDoubleTest, DivisionInvertsMultiplication) {
  std::mt19937_64 rng(2);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 10000; ++i) {
    const DoubleDouble a(normal(rng), 0), b = DoubleDouble(normal(rng)) / 3;
    const DoubleDouble error = a / b * b - a;
    EXPECT_LE(std::abs(error.high), 0x1p-100 * std::abs(a.high));
  }
  EXPECT_EQ((DoubleDouble(1) / 3 * 3 - 1).high, 0.0);
}

}  // namespace
}  // namespace gkv
