#include "engine/step_times.h"

#include <gtest/gtest.h>

#include <array>

namespace gkv {
namespace {

constexpr size_t kMost = StepTimes::kMaxGuesses;

TEST(StepTimesTest, KnowsNothingBeforeStepsWithoutGuesses) {
  StepTimes times;
  std::array<double, 7> extra;
  EXPECT_EQ(times.FillExtra(1, extra), 0u);
  times.Note(1, 0, 0.01);
  EXPECT_EQ(times.FillExtra(1, extra), 0u);
  times.Note(1, 0, 0.01);
  ASSERT_EQ(times.FillExtra(1, extra), 7u);
  for (size_t i = 1; i < 7; ++i) EXPECT_GT(extra[i], extra[i - 1]);
  EXPECT_EQ(times.FillExtra(2, extra), 0u) << "another number of them";
  times.Restart();
  EXPECT_EQ(times.FillExtra(1, extra), 0u);
}

TEST(StepTimesTest, LearnsWhatGuessesTake) {
  StepTimes times;
  for (int i = 0; i < 4; ++i) times.Note(2, 0, 0.01);
  for (int i = 0; i < 40; ++i) times.Note(2, 3, 0.013);
  std::array<double, 7> extra;
  ASSERT_EQ(times.FillExtra(2, extra), 7u);
  EXPECT_NEAR(extra[2], 0.3, 0.05);
  EXPECT_NEAR(extra[6], 0.7, 0.15) << "in proportion";
}

TEST(StepTimesTest, APriceThatWasHighOnceIsTriedAgain) {
  StepTimes times;
  for (int i = 0; i < 4; ++i) times.Note(1, 0, 0.01);
  std::array<double, 1> extra;
  ASSERT_EQ(times.FillExtra(1, extra), 1u);
  const double first = extra[0];
  for (int i = 0; i < 8; ++i) times.Note(1, 1, 0.5);
  times.FillExtra(1, extra);
  EXPECT_GT(extra[0], 2 * first);
  EXPECT_LE(extra[0], 1) << "a guess never costs more than a step";
  for (int i = 0; i < 1000; ++i) times.Note(1, 0, 0.01);
  times.FillExtra(1, extra);
  EXPECT_NEAR(extra[0], first, 0.01);
}

TEST(StepTimesTest, AnInterruptedStepCountsLittle) {
  StepTimes times;
  for (int i = 0; i < 20; ++i) times.Note(1, 0, i == 0 || i == 9 ? 9 : 0.01);
  for (int i = 0; i < 40; ++i) times.Note(1, 1, 0.015);
  std::array<double, 1> extra;
  times.FillExtra(1, extra);
  EXPECT_NEAR(extra[0], 0.5, 0.1);
}

TEST(StepTimesTest, OneInterruptedGuessIsNotBelieved) {
  StepTimes times;
  for (int i = 0; i < 4; ++i) times.Note(1, 0, 0.01);
  EXPECT_NEAR(times.Seconds(1), 0.01, 1e-9);
  EXPECT_EQ(times.Seconds(2), 0);
  std::array<double, 1> before, after;
  ASSERT_EQ(times.FillExtra(1, before), 1u);
  times.Note(1, 1, 5);
  ASSERT_EQ(times.FillExtra(1, after), 1u);
  EXPECT_GT(after[0], before[0]);
  EXPECT_LT(after[0], 2 * before[0] + 0.1);
}

TEST(StepTimesTest, BeyondItsLimitsItKnowsNothing) {
  StepTimes times;
  std::array<double, 7> extra;
  for (const size_t n : {size_t{0}, StepTimes::kMaxSequences + 1}) {
    for (int i = 0; i < 4; ++i) times.Note(n, 0, 0.01);
    EXPECT_EQ(times.FillExtra(n, extra), 0u);
  }
  for (int i = 0; i < 4; ++i) times.Note(1, 0, 0.01);
  times.Note(1, kMost + 1, 0.01);
  std::array<double, kMost + 7> more;
  EXPECT_EQ(times.FillExtra(1, more), kMost);
}

}  // namespace
}  // namespace gkv
