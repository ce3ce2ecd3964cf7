#include "engine/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

constexpr SchedulerOptions kOptions;

PlanInput Decoding(size_t next, size_t rows = 1) {
  return {next, next + rows, next, true};
}
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
  EXPECT_TRUE(PlanStep({}, kOptions).empty());
  // Requests that cannot run stand at their target.
  const std::vector<PlanInput> still = {{5, 5, 5, true}, {7, 7, 6, false}};
  EXPECT_TRUE(PlanStep(still, kOptions).empty());
}

TEST(PlanStepTest, OnePromptGetsTheWholeBudget) {
  const std::vector<PlanInput> inputs = {Prefilling(10, 2000)};
  const auto plan = PlanStep(inputs, kOptions);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].begin, 10u);
  EXPECT_EQ(plan[0].end, 10 + kOptions.step_rows);
}

TEST(PlanStepTest, DecodingComesFirstAndBoundsPrefill) {
  const std::vector<PlanInput> inputs = {Prefilling(0, 5000), Decoding(9),
                                         Decoding(100, 4)};
  const auto rows = RowsByRequest(PlanStep(inputs, kOptions));
  EXPECT_EQ(rows.at(1), 1u);
  EXPECT_EQ(rows.at(2), 4u) << "planned whole";
  EXPECT_EQ(rows.at(0), kOptions.prefill_rows_while_decoding);
}

TEST(PlanStepTest, AShortPromptDoesNotWaitForALongOne) {
  const std::vector<PlanInput> inputs = {Prefilling(0, 30000),
                                         Prefilling(0, 20)};
  const auto plan = PlanStep(inputs, kOptions);
  const auto rows = RowsByRequest(plan);
  EXPECT_EQ(rows.at(1), 20u);
  EXPECT_EQ(rows.at(0), kOptions.step_rows - 20);
  EXPECT_EQ(Rows(plan), kOptions.step_rows);
}

TEST(PlanStepTest, LongPromptsShareEvenly) {
  const std::vector<PlanInput> inputs(4, Prefilling(0, 30000));
  for (const auto& [i, rows] : RowsByRequest(PlanStep(inputs, kOptions))) {
    EXPECT_EQ(rows, kOptions.step_rows / 4) << i;
  }
}

TEST(PlanStepTest, RowsOfLogitsAreBounded) {
  const std::vector<PlanInput> inputs = {AllLogits(0, 1000),
                                         AllLogits(0, 1000)};
  EXPECT_EQ(Rows(PlanStep(inputs, kOptions)), kOptions.logits_rows);
  // Positions before the first wanted row do not count.
  const std::vector<PlanInput> late = {{0, 1000, 50, false}};
  EXPECT_EQ(Rows(PlanStep(late, kOptions)), 50 + kOptions.logits_rows);
}

TEST(PlanStepTest, PromptsKeepAShareOfLogitsOnlyWhileTheyNeedIt) {
  std::vector<PlanInput> inputs(48, Decoding(3));
  inputs.push_back(Prefilling(0, 5000));
  EXPECT_EQ(Rows(PlanStep(inputs, kOptions)),
            kOptions.logits_rows + kOptions.prefill_rows_while_decoding);
  inputs.back() = AllLogits(0, 5000);
  const auto rows = RowsByRequest(PlanStep(inputs, kOptions));
  EXPECT_EQ(rows.at(48), kOptions.logits_rows / 4);
  inputs.back() = Prefilling(4999, 5000);
  EXPECT_EQ(RowsByRequest(PlanStep(inputs, kOptions)).at(48), 1u);
}

TEST(PlanStepTest, UncutSpansAreTakenWhole) {
  const std::vector<UncutSpan> spans = {{20, 40}, {100, 356}, {360, 380}};
  PlanInput image = Prefilling(0, 1000);
  image.uncut = spans;
  const std::vector<size_t> ends = {100, 356, 484};
  for (const size_t end : ends) {
    const auto plan = PlanStep({&image, 1}, kOptions);
    ASSERT_EQ(plan.size(), 1u);
    EXPECT_EQ(plan[0].end, end);
    image.next = plan[0].end;
  }
  // Beside others it waits until it is first in line, and is not cut then.
  std::vector<PlanInput> inputs(5, Prefilling(0, 30000));
  inputs[4].uncut = spans;
  inputs[4].next = 100;
  inputs[4].served = 1;
  EXPECT_FALSE(RowsByRequest(PlanStep(inputs, kOptions)).contains(4));
  for (size_t i = 0; i < 4; ++i) inputs[i].served = 2;
  EXPECT_EQ(RowsByRequest(PlanStep(inputs, kOptions)).at(4), 256u);
}

// Requests that come, run and go, chosen by someone who means harm. Each one
// must get rows within as many steps as there are others of its kind, counted
// when it was served last.
class Crowd {
 public:
  Crowd(SchedulerOptions options, uint32_t seed)
      : options_(options), rng_(seed) {}

  void Add(PlanInput input) {
    input.served = step_;
    waits_.push_back({input, Bound(input) + 1});
  }

  void Step(bool drop_finished) {
    std::vector<PlanInput> inputs;
    for (const Waiting& w : waits_) inputs.push_back(w.input);
    const auto plan = PlanStep(inputs, options_);
    size_t rows = 0, logits = 0;
    ++step_;
    for (Waiting& w : waits_) {
      ASSERT_GT(w.left, 0u) << "starves";
      --w.left;
    }
    for (const PlannedSlice& slice : plan) {
      PlanInput& input = waits_[slice.request].input;
      ASSERT_EQ(slice.begin, input.next);
      ASSERT_LE(slice.end, input.target);
      if (input.decoding) {
        ASSERT_EQ(slice.end, input.target);
      }
      rows += slice.end - slice.begin;
      logits += LogitsRows(input.logits_begin, slice.begin, slice.end);
      input.next = slice.end;
      input.served = step_;
      if (input.next == input.target && (input.decoding || !drop_finished)) {
        input = Decoding(input.next, 1 + rng_() % 8);
        input.served = step_;
      }
      waits_[slice.request].left = Bound(input) + 1;
    }
    EXPECT_LE(rows, options_.step_rows);
    EXPECT_LE(logits, options_.logits_rows);
    std::erase_if(waits_, [](const Waiting& w) {
      return w.input.next == w.input.target;
    });
  }

  size_t size() const { return waits_.size(); }

 private:
  struct Waiting {
    PlanInput input;
    size_t left;  // steps within which it is to be served
  };

  size_t Bound(const PlanInput& input) const {
    return static_cast<size_t>(
        std::count_if(waits_.begin(), waits_.end(), [&](const Waiting& w) {
          return w.input.decoding == input.decoding;
        }));
  }

  const SchedulerOptions options_;
  std::mt19937 rng_;
  uint64_t step_ = 0;
  std::vector<Waiting> waits_;
};

TEST(PlanStepTest, NobodyStarves) {
  SchedulerOptions small;
  small.step_rows = 16;
  small.logits_rows = 12;
  small.prefill_rows_while_decoding = 3;
  for (const SchedulerOptions& options : {kOptions, small}) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
      Crowd crowd(options, seed);
      std::mt19937 rng(seed);
      const size_t limit = 20 + 30 * (seed % 3);
      for (size_t i = 0; i < limit / 2; ++i) crowd.Add(Decoding(i));
      for (int step = 0; step < 1500; ++step) {
        // Endless short prompts, hogs of logits, and long ones among them.
        while (crowd.size() < limit) {
          const size_t kind = (rng() + seed) % 8;
          crowd.Add(kind == 0   ? Prefilling(0, 400 + rng() % 2000)
                    : kind == 1 ? AllLogits(0, 1 + rng() % 500)
                                : Prefilling(0, 1 + rng() % 4));
        }
        crowd.Step(seed % 2 == 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Guesses leave a share of a small step's rows to prompts.
TEST(PlanStepTest, GuessesLeaveRowsToPrompts) {
  for (const size_t step_rows : {2, 3, 4, 8, 9, 10, 11, 12}) {
    SchedulerOptions options;
    options.step_rows = step_rows;
    const std::vector<PlanInput> inputs = {
        Decoding(9, 1 + MaxGuesses(options)), Prefilling(0, 100)};
    const auto plan = PlanStep(inputs, options);
    EXPECT_TRUE(RowsByRequest(plan).contains(1)) << step_rows;
    EXPECT_LE(Rows(plan), step_rows);
  }
  EXPECT_EQ(MaxGuesses(kOptions), kOptions.max_guesses);
}

TEST(PlanStepTest, LogitsRowsCountsTheWantedTail) {
  EXPECT_EQ(LogitsRows(10, 0, 10), 0u);
  EXPECT_EQ(LogitsRows(10, 0, 11), 1u);
  EXPECT_EQ(LogitsRows(10, 12, 20), 8u);
}

TEST(SchedulerOptionsTest, BadOnesAreNamed) {
  EXPECT_NO_THROW(kOptions.Validate());
  SchedulerOptions options;
  options.logits_rows = 1;
  EXPECT_THROW(options.Validate(), InvalidArgument);
  options = {};
  options.step_rows = 0;
  EXPECT_THROW(options.Validate(), InvalidArgument);
  options = {};
  options.max_running = 0;
  EXPECT_THROW(options.Validate(), InvalidArgument);
  options = {};
  options.max_guesses = 24;
  EXPECT_THROW(options.Validate(), InvalidArgument);
}

}  // namespace
}  // namespace gkv
