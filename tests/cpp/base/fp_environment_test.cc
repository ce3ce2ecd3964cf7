#include "base/fp_environment.h"

#include <cfenv>
#include <limits>

#include "base/flush_to_zero.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

// Opaque to the optimizer, so that the arithmetic happens at run time.
float Opaque(float value) {
  volatile float hidden = value;
  return hidden;
}

float HalfOfTheSmallestNormal() {
  return Opaque(std::numeric_limits<float>::min()) * Opaque(0.5f);
}

TEST(FpEnvironmentTest, SubnormalsSurviveInsideAndTheStateComesBack) {
  const FlushToZero flush;
  ASSERT_EQ(HalfOfTheSmallestNormal(), 0.0f);
  {
    const ScopedFpEnvironment fp_environment;
    EXPECT_EQ(HalfOfTheSmallestNormal(), 0x1p-127f);
    EXPECT_EQ(Opaque(0x1p-149f) * Opaque(2.0f), 0x1p-148f);
  }
  EXPECT_EQ(HalfOfTheSmallestNormal(), 0.0f);
}

TEST(FpEnvironmentTest, RoundsToNearestInsideAndTheModeComesBack) {
  const float tiny = Opaque(0x1p-30f);
  std::fesetround(FE_UPWARD);
  const float up_before = Opaque(1.0f) + tiny;
  float inside;
  {
    const ScopedFpEnvironment fp_environment;
    inside = Opaque(1.0f) + tiny;
  }
  const float up_after = Opaque(1.0f) + tiny;
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(up_before, 1.0f + 0x1p-23f);
  EXPECT_EQ(inside, 1.0f);
  EXPECT_EQ(up_after, 1.0f + 0x1p-23f);
}

TEST(FpEnvironmentTest, Nests) {
  const FlushToZero flush;
  const ScopedFpEnvironment outer;
  {
    const ScopedFpEnvironment inner;
    EXPECT_NE(HalfOfTheSmallestNormal(), 0.0f);
  }
  EXPECT_NE(HalfOfTheSmallestNormal(), 0.0f);
}

}  // namespace
}  // namespace gkv
