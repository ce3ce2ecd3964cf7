#include "engine/step_wait.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/inside_step.h"

namespace gkv {
namespace {

class StepWaitTest : public ::testing::Test {
 protected:
  // A step of `runner` begins to wait for another one, if it may.
  static std::optional<StepWait> Wait(const int& runner, const int& other) {
    const InsideStep inside(&runner);
    try {
      return StepWait(&other);
    } catch (const Busy&) {
      return std::nullopt;
    }
  }

  const int a_ = 0, b_ = 0, c_ = 0;
};

TEST_F(StepWaitTest, OutsideOfStepsAnythingMayBeWaitedFor) {
  StepWait::CheckNotInside(&a_);
  const StepWait wait(&a_);
  EXPECT_EQ(wait.step(), nullptr);
}

TEST_F(StepWaitTest, NoStepWaitsForItsOwnRunner) {
  const InsideStep inside(&a_);
  EXPECT_THROW(StepWait::CheckNotInside(&a_), Busy);
  EXPECT_THROW(StepWait{&a_}, Busy);
  StepWait::CheckNotInside(&b_);
}

TEST_F(StepWaitTest, NoCircleIsClosed) {
  std::optional<StepWait> first = Wait(a_, b_);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->step(), &a_);
  EXPECT_FALSE(Wait(b_, a_));
  std::optional<StepWait> second = Wait(b_, c_);
  ASSERT_TRUE(second);
  EXPECT_FALSE(Wait(c_, a_));
  EXPECT_FALSE(Wait(c_, b_));
  EXPECT_TRUE(Wait(a_, c_));
  first.reset();
  EXPECT_TRUE(Wait(c_, a_));
  EXPECT_FALSE(Wait(c_, b_));
  second.reset();
  EXPECT_TRUE(Wait(c_, b_));
}

TEST_F(StepWaitTest, CountsThoseOfOnePair) {
  std::optional<StepWait> first = Wait(a_, b_);
  std::optional<StepWait> again = Wait(a_, b_);
  StepWait moved = *std::move(first);
  first.reset();
  again.reset();
  EXPECT_FALSE(Wait(b_, a_));
  {
    const StepWait last = std::move(moved);
    EXPECT_FALSE(Wait(b_, a_));
  }
  EXPECT_TRUE(Wait(b_, a_));
}

}  // namespace
}  // namespace gkv
