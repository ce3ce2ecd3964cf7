// Drafters as requests meet them. That no bit depends on them is part of
// draft_model_test's machine.

#include "engine/target_drafter.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/random_requests.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

class TargetDrafterTest : public ::testing::Test {
 protected:
  static std::shared_ptr<Engine> Load(const TinyOptions& tiny) {
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    options.scheduler.always_guess = true;
    return Engine::FromTensors(TinyConfig(tiny), source, options);
  }
  // One token over and over: every guess is right.
  static GenerateOptions Same(size_t max_tokens) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    options.logit_bias = {{30, 1000.0f}};
    options.speculate = Speculate::kDraft;
    return options;
  }
  std::shared_ptr<Conversation> NewCache() {
    return CreateConversation(gemma_->config(), {.block_tokens = 16});
  }

  std::shared_ptr<Engine> drafter_ = Load(TinyFamily("gemma4-assistant"));
  std::shared_ptr<Engine> gemma_ =
      Load(TinyFamily("gemma4"))->WithDraft(drafter_);
};

TEST_F(TargetDrafterTest, FewerStepsOfTheTarget) {
  const size_t before = gemma_->stats().steps;
  const GenerateResult found =
      gemma_->Generate(NewCache(), RandomTokens(40, 1), Same(120));
  EXPECT_EQ(found.token_ids, Tokens(120, 30));
  EXPECT_LT(gemma_->stats().steps - before, 30u);
  EXPECT_GT(found.accepted, 90u);
  EXPECT_LE(found.accepted, found.drafted);
  // A row for each guess: it reads no prompt.
  EXPECT_GE(gemma_->stats().draft_rows, found.drafted);
  EXPECT_LE(gemma_->stats().draft_rows, 125u);
}

// Those that decode together are rows of the same rounds.
TEST_F(TargetDrafterTest, ManyShareTheRounds) {
  std::vector<Tokens> prompts;
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<GenerateOptions> options;
  for (uint32_t i = 0; i < 5; ++i) {
    prompts.push_back(RandomTokens(9 + 7 * i, i));
    caches.push_back(NewCache());
    options.push_back(Same(100));
  }
  std::vector<Engine::Job> jobs;
  for (size_t i = 0; i < prompts.size(); ++i) {
    jobs.push_back({caches[i], prompts[i], options[i]});
  }
  const size_t before = gemma_->stats().steps;
  size_t accepted = 0;
  for (const auto& stream : gemma_->Start(jobs)) {
    stream->WaitDone();
    const GenerateResult found = stream->Result();
    EXPECT_EQ(found.token_ids, Tokens(100, 30));
    accepted += found.accepted;
  }
  EXPECT_LT(gemma_->stats().steps - before, 40u);
  EXPECT_GT(accepted, 300u);
}

// What it goes on from is the conversation's own: nothing is read again behind
// forks, rewinds, and copies that were saved.
TEST_F(TargetDrafterTest, FollowsForksAndRewinds) {
  const auto cache = NewCache();
  const auto rows = [&](const std::shared_ptr<Conversation>& on,
                        size_t prompt) {
    const size_t before = gemma_->stats().draft_rows;
    const GenerateResult found = gemma_->Generate(
        on, RandomTokens(prompt, 3), Same(50));
    EXPECT_EQ(found.token_ids, Tokens(50, 30));
    EXPECT_GT(found.accepted, 30u);
    return gemma_->stats().draft_rows - before;
  };
  EXPECT_LT(rows(cache, 300), 60u);
  const std::shared_ptr<Conversation> fork = cache->Fork();
  EXPECT_LT(rows(cache, 5), 60u);
  EXPECT_LT(rows(fork, 7), 60u);
  fork->Truncate(200);  // far behind the window: it is computed again
  EXPECT_LT(rows(fork, 3), 60u);
  EXPECT_LT(rows(Conversation::FromBytes(cache->ToBytes()), 2), 60u);
}

// A drafter is only asked where it was named, and goes when nobody can.
TEST_F(TargetDrafterTest, TheTargetKeepsItAlive) {
  drafter_.reset();
  EXPECT_GT(gemma_->Generate(NewCache(), RandomTokens(9, 1), Same(60)).accepted,
            30u);
  GenerateOptions plain = Same(60);
  plain.speculate = Speculate::kOff;
  const size_t before = gemma_->stats().draft_rows;
  EXPECT_EQ(gemma_->Generate(NewCache(), RandomTokens(9, 1), plain).drafted,
            0u);
  EXPECT_EQ(gemma_->stats().draft_rows, before);
  const auto without = gemma_->WithDraft(nullptr);
  EXPECT_FALSE(without->has_draft());
}

}  // namespace
}  // namespace gkv
