// The acceptance points of docs/cache.md that take a model: real layers of
// every family over real caches, whose free blocks are filled with NaN.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "engine/engine.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;
constexpr std::chrono::seconds kLong{600};

class CacheChecklistTest : public ::testing::TestWithParam<std::string> {
 protected:
  CacheChecklistTest() {
    pool_->set_poison(true);
    const TinyOptions tiny = TypesAround(TinyFamily(GetParam()));
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    gemma_ = Engine::FromTensors(TinyConfig(tiny), source, options);
    recurrent_ = gemma_->config().HasLayers(LayerKind::kRecurrent);
    if (tiny.window != 0) window_ = tiny.window;
  }

  std::shared_ptr<Conversation> NewCache(size_t capacity = 0) {
    CacheOptions options;
    options.capacity_tokens = capacity;
    options.block_tokens = 16;
    options.pool = pool_;
    return CreateConversation(gemma_->config(), options);
  }

  std::vector<float> Logits(const std::shared_ptr<Conversation>& cache,
                            const Tokens& tokens) {
    std::vector<float> logits(gemma_->config().vocab_size);
    const auto request =
        gemma_->StartLogits(cache, tokens, false, logits.data());
    while (!request->WaitDone(kLong)) {
    }
    request->Result();
    return logits;
  }

  static GenerateOptions Options(size_t max_tokens) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    return options;
  }

  // What a conversation of its own gives after these tokens.
  Tokens Expected(const Tokens& prompt, size_t max_tokens) {
    return gemma_->Generate(NewCache(), prompt, Options(max_tokens)).token_ids;
  }

  static Tokens Joined(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<Engine> gemma_;
  bool recurrent_ = false;
  size_t window_ = 24;  // a unit of length where no layer slides
};

TEST_P(CacheChecklistTest, Checklist02_APrefillPastTheWindowKeepsTheWindow) {
  const Tokens tokens = RandomTokens(8 * window_ + 3, 1);
  const auto whole = NewCache();
  const std::vector<float> logits = Logits(whole, tokens);
  const auto single = NewCache();
  std::vector<float> last;
  for (const int32_t token : tokens) last = Logits(single, {token});
  EXPECT_EQ(last, logits);
  const auto& layers = whole->layout().layers();
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const auto [begin, end] = whole->HeldRange(layer);
    EXPECT_EQ(end, tokens.size());
    switch (layers[layer].kind) {
      case LayerKind::kFull:
        EXPECT_EQ(begin, 0u);
        break;
      case LayerKind::kSliding:
        EXPECT_LE(begin, tokens.size() - window_);
        if (recurrent_) break;  // as much as the last step's beginning needs
        EXPECT_GT(begin + window_ + 16, tokens.size() - 1) << "more is kept";
        break;
      case LayerKind::kRecurrent:
        EXPECT_EQ(begin, end);
        break;
    }
  }
}

// Gemma 3 270M at its full context: 3 KiB a token and about 8 MiB.
TEST(CacheChecklist, Checklist10_SlidingLayersHoldTheirWindowOnly) {
  const auto pool = BlockPool::Create();
  const auto cache =
      CreateConversation(ModelType::kGemma3_270M, {.pool = pool});
  constexpr size_t kTokens = 32768;
  cache->Append(cache->Lock(), Tokens(kTokens, 1));
  for (size_t at = 0; at < kTokens; at += 128) {
    KvStepView step = cache->Prepare(cache->Lock(), at, at + 128);
    cache->Commit(cache->Lock(), step);
  }
  const size_t full = kTokens * 3 * 1024;
  EXPECT_GE(cache->nbytes(), full);
  EXPECT_LE(cache->nbytes(), full + size_t{9} * 1024 * 1024);
  EXPECT_EQ(pool->bytes_in_use(), cache->nbytes());
}

TEST_P(CacheChecklistTest, Checklist11_InterleavedConversationsAreAlone) {
  constexpr size_t kConversations = 5;
  constexpr size_t kTurns = 4;
  std::vector<Tokens> turns[kConversations], expected[kConversations];
  for (size_t i = 0; i < kConversations; ++i) {
    const auto alone = NewCache();
    for (size_t turn = 0; turn < kTurns; ++turn) {
      turns[i].push_back(RandomTokens(3 + 11 * i + 5 * turn,
                                      static_cast<uint32_t>(10 * i + turn)));
      expected[i].push_back(
          gemma_->Generate(alone, turns[i].back(), Options(8)).token_ids);
    }
  }
  std::vector<Tokens> found[kConversations];
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kConversations; ++i) {
    threads.emplace_back([&, i] {
      const auto cache = NewCache();
      for (const Tokens& turn : turns[i]) {
        found[i].push_back(gemma_->Generate(cache, turn, Options(8)).token_ids);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kConversations; ++i) EXPECT_EQ(found[i], expected[i]);
}

TEST_P(CacheChecklistTest, Checklist12_AForkAndItsParentNeverSeeEachOther) {
  const Tokens prompt = RandomTokens(2 * window_ + 5, 2);
  const auto parent = NewCache();
  Logits(parent, prompt);
  const std::shared_ptr<Conversation> fork = parent->Fork();
  for (uint32_t turn = 0; turn < 4; ++turn) {
    const Tokens left = RandomTokens(7, 100 + turn);
    const Tokens right = RandomTokens(9, 200 + turn);
    Tokens all_left = parent->tokens(), all_right = fork->tokens();
    const std::vector<float> a = Logits(parent, left);
    const std::vector<float> b = Logits(fork, right);
    EXPECT_EQ(a, Logits(NewCache(), Joined(std::move(all_left), left)));
    EXPECT_EQ(b, Logits(NewCache(), Joined(std::move(all_right), right)));
  }
}

TEST_P(CacheChecklistTest, Checklist13_RewindAndRestoreAreExact) {
  // 0.5, 1, 2 and 8 windows, and one token to either side.
  std::vector<size_t> lengths;
  for (const size_t base : {window_ / 2, window_, 2 * window_, 8 * window_}) {
    if (kSanitized && base % (2 * window_) == 0) continue;
    for (const size_t length : {base - 1, base, base + 1}) {
      lengths.push_back(length);
    }
  }
  const Tokens tokens = RandomTokens(9 * window_, 3);
  const auto cache = NewCache();
  const auto marked = NewCache();
  Logits(cache, tokens);
  for (size_t at = 0; at < tokens.size(); at += window_ + 7) {
    const size_t end = std::min(tokens.size(), at + window_ + 7);
    Logits(marked, {tokens.begin() + static_cast<ptrdiff_t>(at),
                    tokens.begin() + static_cast<ptrdiff_t>(end)});
    ASSERT_TRUE(marked->MakeCheckpoint());
  }
  const Tokens more = RandomTokens(3, 4);
  for (const size_t length : lengths) {
    const Tokens kept(tokens.begin(),
                      tokens.begin() + static_cast<ptrdiff_t>(length));
    const std::vector<float> expected = Logits(NewCache(), Joined(kept, more));
    size_t replay[2];
    for (const bool checkpoints : {false, true}) {
      const std::shared_ptr<Conversation> rewound =
          (checkpoints ? marked : cache)->Fork();
      replay[checkpoints] = rewound->Truncate(length).replay_tokens;
      // Saved in the middle of it all, and restored.
      const std::shared_ptr<Conversation> restored = Conversation::FromBytes(
          rewound->ToBytes(checkpoints), {.block_tokens = 64, .pool = pool_});
      EXPECT_EQ(Logits(restored, more), expected) << length;
      EXPECT_EQ(Logits(rewound, more), expected) << length;
    }
    EXPECT_LE(replay[1], replay[0]);
    if (recurrent_) {
      // The beginning of the last step, or 0.
      const size_t step_rows = SchedulerOptions{}.step_rows;
      EXPECT_EQ(replay[0],
                length < step_rows ? length : length - step_rows);
      EXPECT_LT(replay[1], window_ + 7) << "from the last checkpoint";
    }
  }
}

// Fails at every allocation of a request in turn: the conversation was
// rewound past its window and shares blocks with a fork, so that the request
// replays, copies and grows.
TEST_P(CacheChecklistTest, Checklist14_AFailedRequestLeavesNoTrace) {
  const Tokens tokens = RandomTokens(7 * window_, 5);
  const Tokens prompt = RandomTokens(50, 6);
  const auto cache = NewCache();
  Logits(cache, {tokens.begin(), tokens.begin() + 40});
  ASSERT_TRUE(cache->MakeCheckpoint());
  Logits(cache, {tokens.begin() + 40, tokens.end()});
  const std::shared_ptr<Conversation> bystander = cache->Fork();
  cache->Truncate(3 * window_ + 1);
  const Tokens expected = Expected(Joined(cache->tokens(), prompt), 40);
  const Bytes before = cache->ToBytes(true);
  const Bytes beside = bystander->ToBytes(true);
  const size_t blocks = pool_->blocks_in_use();
  size_t failures = 0;
  GenerateOptions options = Options(40);
  // A step that has no room for its guesses runs without them: no failure.
  options.speculate = Speculate::kOff;
  for (size_t k = 1;; k += kSanitized ? 3 : 1) {
    pool_->FailAfter(k);
    const std::shared_ptr<Conversation> attempt = cache;
    try {
      EXPECT_EQ(gemma_->Generate(attempt, prompt, options).token_ids, expected);
      break;
    } catch (const CacheFull&) {
      ++failures;
    }
    ASSERT_EQ(cache->ToBytes(true), before) << "allocation " << k;
    ASSERT_EQ(bystander->ToBytes(true), beside) << "allocation " << k;
    ASSERT_EQ(pool_->blocks_in_use(), blocks) << "allocation " << k;
  }
  pool_->FailAfter(0);
  EXPECT_GT(failures, kSanitized ? 1u : 5u);
}

// In a batch whoever finds no block gives way to the older ones, and has its
// turn later: a failure that passes is nobody's.
TEST_P(CacheChecklistTest, Checklist14_AFailureThatPassesIsNobodys) {
  std::vector<Tokens> prompts, expected;
  for (uint32_t i = 0; i < 4; ++i) {
    prompts.push_back(RandomTokens(5 + 9 * i, 30 + i));
    expected.push_back(Expected(prompts.back(), 6));
  }
  // Not those of the oldest one's first step, which nobody can give way to.
  for (size_t k = 4; k < 8; ++k) {
    std::vector<std::shared_ptr<Conversation>> caches;
    std::vector<Engine::Job> jobs;
    for (const Tokens& prompt : prompts) {
      caches.push_back(NewCache());
      jobs.push_back({caches.back(), prompt, Options(6)});
    }
    const size_t before = gemma_->stats().preemptions;
    pool_->FailAfter(k);
    const auto requests = gemma_->Start(jobs);
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i]->WaitDone();
      EXPECT_EQ(requests[i]->Result().token_ids, expected[i]) << k;
      EXPECT_EQ(caches[i]->tokens(), Joined(prompts[i], expected[i]));
    }
    EXPECT_EQ(gemma_->stats().preemptions, before + 1) << k;
  }
  pool_->FailAfter(0);
}

TEST_P(CacheChecklistTest, Checklist14_ACancelKeepsWhatWasEmitted) {
  const Tokens prompt = RandomTokens(30, 7);
  const Tokens expected = Expected(prompt, 12);
  for (size_t keep = 1; keep <= 10; keep += 3) {
    const auto cache = NewCache();
    Tokens seen;
    gemma_->Generate(cache, prompt, Options(12), [&](const TokenEvent& event) {
      if (event.token_id >= 0) seen.push_back(event.token_id);
      return seen.size() < keep;
    });
    ASSERT_EQ(seen.size(), keep);
    EXPECT_EQ(cache->tokens(), Joined(prompt, seen));
    // Nothing half done: going on gives what was to come.
    Tokens rest = gemma_->Generate(cache, {}, Options(12 - keep)).token_ids;
    EXPECT_EQ(Joined(seen, rest), expected);
  }
}

TEST_P(CacheChecklistTest, Checklist16_ACachedPromptStillGivesLogits) {
  for (const size_t length : {size_t{1}, size_t{16}, 3 * window_ + 2}) {
    const Tokens prompt = RandomTokens(length, 8);
    const Tokens expected = Expected(prompt, 10);
    const auto cache = NewCache();
    Logits(cache, prompt);  // all of it is computed
    EXPECT_EQ(cache->next_position(), length);
    // A recurrent state goes back to the beginning of the last step only.
    EXPECT_EQ(cache->next_position_for_logits(), recurrent_ ? 0 : length - 1);
    const std::shared_ptr<Conversation> fork = cache->Fork();
    EXPECT_EQ(gemma_->Generate(cache, {}, Options(10)).token_ids, expected);
    EXPECT_EQ(gemma_->Generate(fork, {}, Options(10)).token_ids, expected);
  }
}

TEST_P(CacheChecklistTest, Checklist17_ReferencesReturnToZero) {
  const Tokens prompt = RandomTokens(5 * window_, 9);
  {
    const auto cache = NewCache();
    // The end, a cancel, an exception, an abort, a full pool.
    gemma_->Generate(cache, prompt, Options(5));
    cache->MakeCheckpoint();
    gemma_->Generate(cache, prompt, Options(50),
                     [](const TokenEvent&) { return false; });
    cache->MakeCheckpoint();
    EXPECT_THROW(gemma_->Generate(cache, prompt, Options(5),
                                  [](const TokenEvent&) -> bool {
                                    throw std::runtime_error("mine");
                                  }),
                 std::runtime_error);
    const Engine::Job job{cache, prompt, Options(500), true};
    const auto request = gemma_->Start({&job, 1})[0];
    request->NextEvent(kLong);
    request->Stop(TokenStream::Interrupt::kAbort);
    while (!request->WaitDone(kLong)) {
    }
    pool_->FailAfter(2);
    EXPECT_THROW(gemma_->Generate(cache, prompt, Options(5)), CacheFull);
    pool_->FailAfter(0);
    const size_t used = pool_->bytes_in_use();
    EXPECT_EQ(used, cache->nbytes()) << "someone else still holds a block";
    EXPECT_EQ(cache->shared_nbytes(), 0u);
    // A block that a fork refers to outlives its origin.
    const std::shared_ptr<Conversation> fork = cache->Fork();
    cache->Reset();
    EXPECT_EQ(pool_->bytes_in_use(), used);
    EXPECT_EQ(fork->nbytes(), used);
  }
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
  EXPECT_EQ(pool_->bytes_in_use(), 0u);
}

TEST_P(CacheChecklistTest, Checklist18_PromptsOfAnyLength) {
  constexpr size_t kCapacity = 40;
  for (const size_t length : {1, 15, 16, 17, 31, 33, 39, 40}) {
    const Tokens prompt = RandomTokens(length, 12);
    const auto cache = NewCache(kCapacity);
    const GenerateResult result = gemma_->Generate(cache, prompt, Options(100));
    EXPECT_EQ(result.finish_reason, FinishReason::kLength);
    EXPECT_EQ(result.token_ids.size(), kCapacity - length);
    EXPECT_EQ(cache->length(), kCapacity);
    const Tokens expected = Expected(prompt, kCapacity - length);
    EXPECT_EQ(result.token_ids, expected);
    // Full to the last token, and whole.
    EXPECT_THROW(gemma_->Generate(cache, {{1}}, Options(1)), CacheFull);
    EXPECT_EQ(cache->tokens(), Joined(prompt, expected));
  }
  const auto cache = NewCache(kCapacity);
  EXPECT_THROW(gemma_->Generate(cache, RandomTokens(41, 13), Options(1)),
               CacheFull);
  EXPECT_THROW(gemma_->Generate(cache, {}, Options(1)), InvalidArgument)
      << "nothing to go on from";
  EXPECT_EQ(cache->length(), 0u);
  EXPECT_EQ(cache->nbytes(), 0u);
}

TEST_P(CacheChecklistTest, Checklist20_SavingWhileAnotherGenerates) {
  const Tokens prompt = RandomTokens(3 * window_, 14);
  const Tokens expected = Expected(prompt, 200);
  const auto running = NewCache();
  const auto resting = NewCache();
  Logits(resting, prompt);
  const Bytes rest = resting->ToBytes(true);
  const Engine::Job job{running, prompt, Options(200), false};
  const auto request = gemma_->Start({&job, 1})[0];
  size_t saves = 0;
  Tokens whole = Joined(prompt, expected);
  while (!request->WaitDone(std::chrono::milliseconds(0))) {
    EXPECT_EQ(resting->ToBytes(true), rest);
    // The running one is saved as its last step left it.
    const auto saved =
        Conversation::FromBytes(running->ToBytes(true), {.pool = pool_});
    const Tokens tokens = saved->tokens();
    ASSERT_LE(tokens.size(), whole.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), whole.begin()));
    ++saves;
  }
  EXPECT_GT(saves, 0u);
  EXPECT_EQ(request->Result().token_ids, expected);
}

INSTANTIATE_TEST_SUITE_P(Families, CacheChecklistTest,
                         ::testing::ValuesIn(CheckedFamilies()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gkv
