#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace gkv {
namespace {

PlanInput Decoding(size_t next) { return {next, next + 1, next, true}; }
PlanInput Prefilling(size_t next, size_t target) {
  return {next, target, target - 1, false};
}
PlanInput AllLogits(size_t next, size_t target) {
  return {next, target, next, false};
}

size_t Rows(const std::vector<PlannedSlice>& plan) {
  size_t rows = 0;
  for (const PlannedSlice& slice : plan) rows += slice.end - slice.begin;
  return rows;
}

std::map<size_t, size_t> RowsByRequest(const std::vector<PlannedSlice>& plan) {
  std::map<size_t, size_t> rows;
  for (const PlannedSlice& slice : plan) {
    rows[slice.request] += slice.end - slice.begin;
  }
  return rows;
}

TEST(PlanStepTest, NothingToDo) {
  EXPECT_TRUE(PlanStep({}, 0).empty());
  // Paused requests stand at their target.
  const std::vector<PlanInput> paused = {{5, 5, 5, true}, {7, 7, 6, false}};
  EXPECT_TRUE(PlanStep(paused, 1).empty());
}

TEST(PlanStepTest, OnePromptGetsTheWholeBudget) {
  const std::vector<PlanInput> inputs = {Prefilling(10, 2000)};
  const auto plan = PlanStep(inputs, 0);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].begin, 10u);
  EXPECT_EQ(plan[0].end, 10 + kMaxStepRows);
}

TEST(PlanStepTest, DecodingComesFirstAndBoundsPrefill) {
  const std::vector<PlanInput> inputs = {Prefilling(0, 5000), Decoding(9),
                                         Decoding(100)};
  const auto rows = RowsByRequest(PlanStep(inputs, 0));
  EXPECT_EQ(rows.at(1), 1u);
  EXPECT_EQ(rows.at(2), 1u);
  EXPECT_EQ(rows.at(0), kPrefillRowsWhileDecoding);
}

TEST(PlanStepTest, AShortPromptDoesNotWaitForALongOne) {
  const std::vector<PlanInput> inputs = {Prefilling(0, 30000),
                                         Prefilling(0, 20)};
  const auto plan = PlanStep(inputs, 0);
  const auto rows = RowsByRequest(plan);
  EXPECT_EQ(rows.at(1), 20u);
  EXPECT_EQ(rows.at(0), kMaxStepRows - 20);
  EXPECT_EQ(Rows(plan), kMaxStepRows);
}

TEST(PlanStepTest, LongPromptsShareEvenly) {
  const std::vector<PlanInput> inputs(4, Prefilling(0, 30000));
  for (const auto& [request, rows] : RowsByRequest(PlanStep(inputs, 3))) {
    EXPECT_EQ(rows, kMaxStepRows / 4) << request;
  }
}

TEST(PlanStepTest, RowsOfLogitsAreBounded) {
  const std::vector<PlanInput> inputs = {AllLogits(0, 1000),
                                         AllLogits(0, 1000)};
  EXPECT_EQ(Rows(PlanStep(inputs, 0)), kMaxLogitsRows);
  // Positions before the first wanted row do not count.
  const std::vector<PlanInput> late = {{0, 1000, 50, false}};
  EXPECT_EQ(Rows(PlanStep(late, 0)), 50 + kMaxLogitsRows);
}

TEST(PlanStepTest, RotationReachesEveryDecodingRequest) {
  const size_t count = kMaxLogitsRows + 10;
  const std::vector<PlanInput> inputs(count, Decoding(3));
  std::map<size_t, size_t> served;
  for (size_t step = 0; step < count; ++step) {
    for (const auto& [request, rows] : RowsByRequest(PlanStep(inputs, step))) {
      served[request] += rows;
    }
  }
  ASSERT_EQ(served.size(), count);
  for (const auto& [request, rows] : served) {
    EXPECT_EQ(rows, kMaxLogitsRows) << request;
  }
}

TEST(PlanStepTest, LogitsRowsCountsTheWantedTail) {
  EXPECT_EQ(LogitsRows(10, 0, 10), 0u);
  EXPECT_EQ(LogitsRows(10, 0, 11), 1u);
  EXPECT_EQ(LogitsRows(10, 12, 20), 8u);
}

}  // namespace
}  // namespace gkv
