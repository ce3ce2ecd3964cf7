#include "engine/learned.h"

#include <gtest/gtest.h>

namespace gkv {
namespace {

TEST(LearnedMeanTest, WhatCameLastCountsMost) {
  LearnedMean mean{0.5, 2};
  mean.Note(1, 10);
  EXPECT_NEAR(mean.value, 2.0 / 3, 1e-12);
  for (int i = 0; i < 100; ++i) mean.Note(0, 10);
  EXPECT_LT(mean.value, 1e-4);
  mean.Note(1, 10);
  EXPECT_NEAR(mean.value, 0.1, 1e-4) << "one of the last ten";
}

// A first one that another process interrupted would end all drafting.
TEST(LearnedTimeTest, TheFirstIsNotBelievedAlone) {
  LearnedTime time;
  EXPECT_EQ(time.seconds(), 0);
  time.Note(1);
  EXPECT_EQ(time.seconds(), 0);
  time.Note(0.001);
  EXPECT_EQ(time.seconds(), 0.001);
  for (int i = 0; i < 50; ++i) time.Note(0.002);
  EXPECT_NEAR(time.seconds(), 0.002, 1e-5);
  time.Note(5);
  EXPECT_LT(time.seconds(), 0.0023);
  time.Restart();
  EXPECT_EQ(time.seconds(), 0);
  time.Note(0.5);
  EXPECT_EQ(time.seconds(), 0);
}

}  // namespace
}  // namespace gkv
