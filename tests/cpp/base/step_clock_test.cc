#include "base/step_clock.h"

#include <chrono>
#include <numeric>
#include <set>

#include "base/thread_pool.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

TimePoint g_now;

TimePoint Told() { return g_now; }

void Pass(int milliseconds) {
  g_now += std::chrono::milliseconds(milliseconds);
}

double PartOf(const PhaseProfile& profile, StepPart part) {
  return profile.part_s[static_cast<size_t>(part)];
}

double SerialOf(const PhaseProfile& profile, StepPart part) {
  return profile.serial_s[static_cast<size_t>(part)];
}

PhaseProfile PhaseOf(const StepClock& clock, StepPhase phase) {
  return clock.profile().phases[static_cast<size_t>(phase)];
}

double SumOf(const PhaseProfile& profile) {
  return std::accumulate(profile.part_s.begin(), profile.part_s.end(), 0.0);
}

TEST(StepClockTest, EveryPartHasAName) {
  std::set<std::string_view> names(kStepPartNames.begin(),
                                   kStepPartNames.end());
  EXPECT_EQ(names.size(), kStepParts);
  EXPECT_EQ(names.count(""), 0u);
  EXPECT_EQ(static_cast<size_t>(StepPart::kJoins) + 1, kStepParts);
  EXPECT_EQ(kStepPartNames[static_cast<size_t>(StepPart::kJoins)], "joins");
  EXPECT_EQ(kStepPartNames[static_cast<size_t>(StepPart::kGateUp)], "gate_up");
  EXPECT_EQ(kStepPhaseNames[static_cast<size_t>(StepPhase::kEmbedding)],
            "embedding");
}

TEST(StepClockTest, EveryMomentIsInOnePart) {
  StepClock clock(&Told);
  clock.Begin();
  Pass(1);
  clock.Enter(StepPart::kQkv);
  Pass(2);
  clock.Fork();
  Pass(4);
  clock.Work();
  Pass(8);
  clock.Wait();
  Pass(16);
  clock.Join();
  Pass(32);
  clock.Enter(StepPart::kSampling);
  Pass(64);
  clock.End(StepPhase::kDecode, 3);
  const PhaseProfile decode = PhaseOf(clock, StepPhase::kDecode);
  EXPECT_EQ(decode.steps, 1u);
  EXPECT_EQ(decode.rows, 3u);
  EXPECT_EQ(decode.loops, 1u);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kPlanning), 0.001);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kQkv), 0.002 + 0.008 + 0.032);
  EXPECT_DOUBLE_EQ(SerialOf(decode, StepPart::kQkv), 0.002 + 0.032);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kJoins), 0.004 + 0.016);
  EXPECT_DOUBLE_EQ(SerialOf(decode, StepPart::kJoins), 0);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kSampling), 0.064);
  EXPECT_DOUBLE_EQ(decode.seconds, 0.127);
  EXPECT_DOUBLE_EQ(SumOf(decode), decode.seconds);
  EXPECT_EQ(PhaseOf(clock, StepPhase::kPrefill).steps, 0u);
}

TEST(StepClockTest, AStepThatDoesNotEndCountsNothing) {
  StepClock clock(&Told);
  clock.Begin();
  clock.Enter(StepPart::kHead);
  clock.Fork();
  clock.Work();
  Pass(5);
  // It failed there.
  clock.Begin();
  Pass(1);
  clock.End(StepPhase::kPrefill, 1);
  Pass(100);  // between steps
  clock.Begin();
  Pass(2);
  clock.End(StepPhase::kPrefill, 7);
  const PhaseProfile prefill = PhaseOf(clock, StepPhase::kPrefill);
  EXPECT_EQ(prefill.steps, 2u);
  EXPECT_EQ(prefill.rows, 8u);
  EXPECT_EQ(prefill.loops, 0u);
  EXPECT_DOUBLE_EQ(prefill.seconds, 0.003);
  EXPECT_DOUBLE_EQ(PartOf(prefill, StepPart::kPlanning), 0.003);
  EXPECT_DOUBLE_EQ(SumOf(prefill), prefill.seconds);
}

TEST(StepClockTest, WhatComesAfterTheEndIsNoOtherStep) {
  StepClock clock(&Told);
  clock.Begin();
  clock.Enter(StepPart::kSampling);
  Pass(4);
  clock.End(StepPhase::kDecode, 2);
  EXPECT_DOUBLE_EQ(PhaseOf(clock, StepPhase::kDecode).seconds, 0.004);
  clock.Enter(StepPart::kPlanning);
  Pass(1);
  clock.AddRest(StepPhase::kDecode);
  const PhaseProfile decode = PhaseOf(clock, StepPhase::kDecode);
  EXPECT_EQ(decode.steps, 1u);
  EXPECT_EQ(decode.rows, 2u);
  EXPECT_DOUBLE_EQ(decode.seconds, 0.005);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kPlanning), 0.001);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kSampling), 0.004);
}

// A draft model's products are drafting, not products of the model.
TEST(StepClockTest, WhileItIsHeldThePartStays) {
  StepClock clock(&Told);
  clock.Begin();
  clock.Enter(StepPart::kDrafting);
  clock.Hold(true);
  clock.Enter(StepPart::kQkv);
  Pass(4);
  clock.Fork();
  Pass(1);
  clock.Work();
  clock.Wait();
  clock.Join();
  clock.Hold(false);
  clock.Enter(StepPart::kQkv);
  Pass(2);
  clock.End(StepPhase::kDecode, 1);
  // One that failed while it was held.
  clock.Begin();
  clock.Enter(StepPart::kDrafting);
  clock.Hold(true);
  clock.Begin();
  clock.Enter(StepPart::kHead);
  Pass(8);
  clock.End(StepPhase::kDecode, 1);
  const PhaseProfile decode = PhaseOf(clock, StepPhase::kDecode);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kDrafting), 0.004);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kJoins), 0.001);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kQkv), 0.002);
  EXPECT_DOUBLE_EQ(PartOf(decode, StepPart::kHead), 0.008);
}

// With real threads and the real time: waiting for a slow thread is a join, and
// a loop of one task, or on one thread, is none.
TEST(StepClockTest, ThePoolTellsOfItsLoops) {
  for (const size_t threads : {1, 3}) {
    ThreadPool pool(threads);
    StepClock clock;
    pool.set_clock(&clock);
    clock.Begin();
    pool.Enter(StepPart::kDown);
    pool.Run(1, [](size_t, size_t) {});
    for (int i = 0; i < 10; ++i) pool.Run(8, [](size_t, size_t) {});
    clock.End(StepPhase::kMixed, 1);
    const PhaseProfile mixed = PhaseOf(clock, StepPhase::kMixed);
    EXPECT_EQ(mixed.loops, threads == 1 ? 0u : 10u);
    EXPECT_EQ(mixed.loops, pool.parallel_loops());
    EXPECT_EQ(PartOf(mixed, StepPart::kJoins) > 0, threads > 1);
    EXPECT_EQ(PartOf(mixed, StepPart::kDown) >
                  SerialOf(mixed, StepPart::kDown),
              threads > 1);
    EXPECT_NEAR(SumOf(mixed), mixed.seconds, 1e-9 * kStepParts);
  }
}

}  // namespace
}  // namespace gkv
