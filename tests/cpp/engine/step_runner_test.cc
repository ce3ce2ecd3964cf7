// Steps of a tiny model, one at a time, without a thread of a scheduler.

#include "engine/step_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fp_environment.h"
#include "engine/drafter.h"
#include "engine/row_consumer.h"
#include "model/create_conversation.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Ids = std::vector<int32_t>;

class StepRunnerTest : public ::testing::Test {
 protected:
  StepRunnerTest() { Limit(SchedulerOptions{}); }

  void Limit(const SchedulerOptions& options) {
    runner_.reset();
    queue_ = std::make_unique<RunQueue>(options);
    runner_ = std::make_unique<StepRunner>(*model_, pool_, &clock_, options,
                                           *queue_);
  }
  struct Asked {
    size_t prompt = 20;
    size_t tokens = 4;
    std::shared_ptr<BlockPool> blocks = nullptr;
    std::unique_ptr<Constraint> constraint = nullptr;
    LogitsProcessor processor = nullptr;
    std::vector<int32_t> guessed = {};  // each time, by its drafter
  };
  std::shared_ptr<TokenStream> Submit() { return Submit(Asked{}); }
  std::shared_ptr<TokenStream> Submit(Asked asked) {
    const auto cache = CreateConversation(
        model_->config,
        {.block_tokens = 16, .pool = asked.blocks ? asked.blocks : blocks_});
    Ids prompt(asked.prompt);
    std::iota(prompt.begin(), prompt.end(), 2);
    auto stream = std::make_shared<TokenStream>(cache, cache->Lock(), prompt,
                                                TokenStream::Options{});
    GenerateOptions options;
    options.max_tokens = asked.tokens;
    options.logits_processor = asked.processor;
    Request::Parts parts{.stream = stream};
    parts.consumer = std::make_unique<TokenSampler>(
        options, 1, Ids(), asked.constraint != nullptr, Ids(), nullptr);
    parts.constraint = std::move(asked.constraint);
    if (!asked.guessed.empty()) {
      parts.guessed_by.drafter = std::make_shared<Says>(asked.guessed);
    }
    std::list<Request> requests;
    requests.emplace_back(std::move(parts));
    queue_->Submit(std::move(requests));
    return stream;
  }
  // One turn of the loop.
  std::optional<StepPhase> Step() {
    EXPECT_TRUE(queue_->WaitForWork());
    clock_.Begin();
    queue_->Interrupt();
    queue_->Retire();
    queue_->Admit();
    const auto phase = runner_->Run(queue_->Runnable());
    queue_->Retire();
    return phase;
  }
  Ids TokensOf(const std::shared_ptr<TokenStream>& stream) {
    while (!stream->done()) Step();
    return stream->Result().token_ids;
  }

  struct Says : Drafter {
    explicit Says(Ids ids) : ids(std::move(ids)) {}
    void Read(std::span<const int32_t>, size_t) noexcept override {}
    size_t Propose(std::span<const int32_t>,
                   std::span<DraftGuess> guesses) override {
      const size_t count = std::min(guesses.size(), ids.size());
      for (size_t i = 0; i < count; ++i) guesses[i] = {ids[i]};
      return count;
    }
    void End(std::span<const int32_t>) noexcept override {}
    const Ids ids;
  };

  const ScopedFpEnvironment fp_environment_;
  const std::shared_ptr<const Model> model_ =
      TinyModel(TypesAround(TinyFamily("gemma3")));
  ThreadPool pool_{2};
  StepClock clock_;
  std::shared_ptr<BlockPool> blocks_ = BlockPool::Create();
  std::unique_ptr<RunQueue> queue_;
  std::unique_ptr<StepRunner> runner_;
};

TEST_F(StepRunnerTest, NobodyMeansNoStep) {
  EXPECT_EQ(runner_->Run({}), std::nullopt);
  EXPECT_EQ(runner_->steps(), 0u);
}

TEST_F(StepRunnerTest, AStepTellsWhatItCountsAs) {
  const auto first = Submit();
  EXPECT_EQ(Step(), StepPhase::kPrefill);
  EXPECT_EQ(Step(), StepPhase::kDecode);
  const auto second = Submit();
  EXPECT_EQ(Step(), StepPhase::kMixed);
  EXPECT_EQ(Step(), StepPhase::kDecode);
  EXPECT_EQ(runner_->steps(), 4u);
  EXPECT_TRUE(first->done());
  EXPECT_EQ(clock_.profile().phases[size_t(StepPhase::kMixed)].rows, 21u);
  EXPECT_EQ(TokensOf(second), first->Result().token_ids);
}

TEST_F(StepRunnerTest, StepsTakeNoMoreRowsThanTheyMay) {
  SchedulerOptions options;
  options.step_rows = 8;
  Limit(options);
  const auto stream = Submit();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Step(), StepPhase::kPrefill);
  EXPECT_EQ(stream->progress(), 16u);
  Step();
  EXPECT_EQ(stream->progress(), 21u);
}

TEST_F(StepRunnerTest, RightGuessesAreTokensOfTheSameStep) {
  SchedulerOptions options;
  options.always_guess = true;
  Limit(options);
  const Ids expected = TokensOf(Submit({.tokens = 6}));
  const Ids next(expected.begin() + 1, expected.end());
  const size_t before = runner_->steps();
  const auto guessed = Submit({.tokens = 6, .guessed = next});
  EXPECT_EQ(TokensOf(guessed), expected);
  EXPECT_EQ(runner_->steps() - before, 2u);
  EXPECT_EQ(guessed->Result().accepted, 4u);
}

TEST_F(StepRunnerTest, AFailureIsTheRequestsOwn) {
  const auto fails = Submit({.processor = [](auto...) {
    throw std::domain_error("no");
  }});
  const auto other = Submit();
  Step();
  EXPECT_THROW((void)fails->Result(), std::domain_error);
  EXPECT_EQ(TokensOf(other).size(), 4u);
}

// Allows one token alone, and counts the threads that ask it.
struct Only : Constraint {
  explicit Only(int32_t id, bool fails = false) : id(id), fails(fails) {}
  bool ComputeMask(std::span<uint32_t> mask) override {
    if (fails) throw std::domain_error("no");
    std::fill(mask.begin(), mask.end(), 0);
    mask[static_cast<size_t>(id) / 32] = uint32_t{1} << (id % 32);
    return false;
  }
  void Accept(int32_t) override {}
  void Rollback(size_t) override {}
  std::unique_ptr<Constraint> Clone() const override {
    return std::make_unique<Only>(id, fails);
  }
  const int32_t id;
  const bool fails;
};

TEST_F(StepRunnerTest, MasksHoldForTheirOwnRequest) {
  const Ids free = TokensOf(Submit());
  const auto bound = Submit({.constraint = std::make_unique<Only>(33)});
  const auto fails = Submit({.constraint = std::make_unique<Only>(33, true)});
  const auto other = Submit();
  EXPECT_EQ(TokensOf(bound), Ids(4, 33));
  EXPECT_THROW((void)fails->Result(), std::domain_error);
  EXPECT_EQ(TokensOf(other), free);
}

// Room for one request and a part of another one.
TEST_F(StepRunnerTest, TheYoungerGivesWayAndComesBack) {
  const Ids expected = TokensOf(Submit({.prompt = 60, .tokens = 8}));
  const auto probe = CreateConversation(model_->config, {.block_tokens = 16});
  size_t bytes = 0;  // of 16 positions
  for (const KvGroup& group : probe->layout().groups()) {
    bytes += group.block_bytes;
  }
  const auto blocks = BlockPool::Create(bytes * 15 / 2);
  const auto older = Submit({.prompt = 60, .tokens = 8, .blocks = blocks});
  const auto younger = Submit({.prompt = 60, .tokens = 8, .blocks = blocks});
  EXPECT_EQ(TokensOf(older), expected);
  EXPECT_FALSE(younger->done());
  EXPECT_GT(queue_->preemptions(), 0u);
  EXPECT_EQ(TokensOf(younger), expected);
}

TEST_F(StepRunnerTest, WhatIsTooLargeAloneFails) {
  const auto blocks = BlockPool::Create(1024);
  const auto stream = Submit({.prompt = 60, .blocks = blocks});
  Step();
  EXPECT_THROW((void)stream->Result(), CacheFull);
}

}  // namespace
}  // namespace gkv
