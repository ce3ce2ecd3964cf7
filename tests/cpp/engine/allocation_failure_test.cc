// The n-th allocation of the process fails, for every n of what two
// conversations do in the same steps: no lack of memory ends the process, takes
// from a conversation, keeps a lock, or is anybody's but the request's that it
// ends.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "base/sanitized.h"
#include "engine/engine.h"
#include "model/tiny_model.h"
#include "store/prefix_cache.h"

namespace {

std::atomic<long> allocations_left{-1};  // negative: all succeed

void* Allocate(std::size_t size, std::size_t alignment) {
  if (allocations_left.load(std::memory_order_relaxed) >= 0 &&
      allocations_left.fetch_sub(1) == 0) {
    return nullptr;
  }
  if (alignment <= alignof(std::max_align_t)) return std::malloc(size);
  return std::aligned_alloc(alignment,
                            (size + alignment - 1) / alignment * alignment);
}

void* AllocateOrThrow(std::size_t size, std::size_t alignment) {
  void* const memory = Allocate(size == 0 ? 1 : size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Inlined, the compiler takes free() for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return AllocateOrThrow(size, 1);
}
[[gnu::noinline]] void* operator new[](std::size_t size) {
  return AllocateOrThrow(size, 1);
}
[[gnu::noinline]] void* operator new(std::size_t size,
                                     const std::nothrow_t&) noexcept {
  return Allocate(size == 0 ? 1 : size, 1);
}
[[gnu::noinline]] void* operator new[](std::size_t size,
                                       const std::nothrow_t&) noexcept {
  return Allocate(size == 0 ? 1 : size, 1);
}
[[gnu::noinline]] void* operator new(std::size_t size,
                                     std::align_val_t alignment) {
  return AllocateOrThrow(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new[](std::size_t size,
                                     std::align_val_t alignment) {
  return AllocateOrThrow(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete[](void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t,
                                       std::align_val_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete[](void* p, std::size_t,
                                       std::align_val_t) noexcept {
  std::free(p);
}

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

class AllocationFailureTest : public ::testing::Test {
 protected:
  AllocationFailureTest() {
    gemma_ = Load(TypesAround());
    // It thinks alike, and is always right.
    draft_ = Load(TypesAround());
  }

  static std::shared_ptr<Engine> Load(const TinyOptions& tiny) {
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    options.scheduler.always_guess = true;
    return Engine::FromTensors(TinyConfig(tiny), source, options);
  }

  std::shared_ptr<Conversation> NewCache() {
    return CreateConversation(gemma_->config(),
                              {.block_tokens = 16, .pool = pool_});
  }

  static GenerateOptions Options(uint64_t seed,
                                 Speculate speculate = Speculate::kOff) {
    GenerateOptions options;
    options.speculate = speculate;
    options.max_tokens = 6;
    options.temperature = 0.9f;
    options.top_p = 0.9f;
    options.seed = seed;
    options.logprobs = true;
    options.ignore_eos = true;
    return options;
  }

  const std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<Engine> gemma_, draft_;
};

enum class Guesser { kLookup, kDraft, kDrafter };

// One that is streamed and one that is not, which the other may not disturb;
// guessed by lookup, by a draft model, and by a drafter that reads the target's
// keys and values.
class SpeculatingTest : public AllocationFailureTest,
                        public ::testing::WithParamInterface<Guesser> {
 protected:
  static Speculate How() {
    return GetParam() == Guesser::kLookup ? Speculate::kLookup
                                          : Speculate::kDraft;
  }
};

TEST_P(SpeculatingTest, EndsARequestAtMost) {
  if (GetParam() == Guesser::kDrafter) {
    gemma_ = Load(TinyFamily("gemma4"));
    draft_ = Load(TinyFamily("gemma4-assistant"));
  }
  if (How() == Speculate::kDraft) gemma_ = gemma_->WithDraft(draft_);
  const Tokens prompts[] = {RandomTokens(40, 1), RandomTokens(25, 2)};
  Tokens expected[2];
  std::shared_ptr<Conversation> begun[2];
  for (size_t i = 0; i < 2; ++i) {
    expected[i] =
        gemma_->Generate(NewCache(), prompts[i], Options(i)).token_ids;
    begun[i] = NewCache();
    gemma_->Generate(begun[i], RandomTokens(20, 9), Options(7));
  }
  size_t failed = 0, whole = 0;
  for (long n = 0;; n += kSanitized ? 7 : 1) {
    std::shared_ptr<Conversation> caches[] = {NewCache(), NewCache()};
    std::shared_ptr<TokenStream> streams[2];
    Tokens read;
    read.reserve(100);
    bool refused = false;
    {
      const auto options = [](uint64_t seed) {
        return Options(seed, How());
      };
      const Engine::Job jobs[] = {{caches[0], prompts[0], options(0), true},
                                  {caches[1], prompts[1], options(1)}};
      allocations_left = n;
      try {
        const auto started = gemma_->Start(jobs);
        for (size_t i = 0; i < 2; ++i) streams[i] = started[i];
        while (const auto event = streams[0]->NextEvent()) {
          if (event->token_id >= 0) read.push_back(event->token_id);
        }
        streams[1]->WaitDone();
      } catch (const std::bad_alloc&) {
        refused = true;
      }
    }
    const bool unspent = allocations_left.exchange(-1) >= 0;
    if (refused) {
      for (const auto& cache : caches) {
        ASSERT_EQ(cache->length(), 0u) << n;
        ASSERT_TRUE(cache->TryLock()) << n;
      }
      continue;
    }
    size_t failures = 0;
    for (size_t i = 0; i < 2; ++i) {
      Tokens kept = prompts[i];
      try {
        const Tokens& found = streams[i]->Result().token_ids;
        ASSERT_EQ(found, expected[i]) << n;
        kept.insert(kept.end(), found.begin(), found.end());
      } catch (const std::exception&) {
        ++failures;
        if (i == 1 || read.empty()) {
          kept.clear();
        } else if (caches[0]->length() == 0) {
          kept.clear();  // no memory to keep what was delivered
        } else {
          kept.insert(kept.end(), read.begin(), read.end());
        }
      }
      ASSERT_EQ(caches[i]->tokens(), kept) << n << " " << i;
      ASSERT_TRUE(caches[i]->TryLock()) << n;
    }
    ASSERT_LE(failures, 1u) << n;
    ++(failures > 0 ? failed : whole);
    if (unspent) break;
  }
  EXPECT_GT(failed, kSanitized ? 2u : 20u);
  EXPECT_GT(whole, 0u);
  // Blocks and requests are all gone.
  std::shared_ptr<Conversation> last = NewCache();
  EXPECT_EQ(gemma_->Generate(last, prompts[0], Options(0)).token_ids,
            expected[0]);
  last.reset();
  EXPECT_EQ(pool_->bytes_in_use(), begun[0]->nbytes() + begun[1]->nbytes());
}

std::string GuesserName(const ::testing::TestParamInfo<Guesser>& info) {
  constexpr const char* kNames[] = {"Lookup", "Draft", "Drafter"};
  return kNames[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Guesses, SpeculatingTest,
                         ::testing::Values(Guesser::kLookup, Guesser::kDraft,
                                           Guesser::kDrafter),
                         GuesserName);

// Also where there is no memory for the result of what has succeeded.
TEST_F(AllocationFailureTest, WhatGenerateThrowsLeavesNoTrace) {
  const Tokens prompt = RandomTokens(25, 2);
  const GenerateOptions options = Options(1);
  const Tokens expected =
      gemma_->Generate(NewCache(), prompt, options).token_ids;
  size_t failed = 0;
  for (long n = 0;; n += kSanitized ? 3 : 1) {
    const std::shared_ptr<Conversation> cache = NewCache();
    Tokens found;
    bool threw = false;
    allocations_left = n;
    try {
      found = gemma_->Generate(cache, prompt, options).token_ids;
    } catch (const std::exception&) {
      threw = true;
    }
    const bool unspent = allocations_left.exchange(-1) >= 0;
    if (threw) {
      ++failed;
      ASSERT_EQ(cache->length(), 0u) << n;
    } else {
      ASSERT_EQ(found, expected) << n;
    }
    if (unspent) break;
  }
  EXPECT_GT(failed, kSanitized ? 2u : 20u);
}

// The prefix cache loses an entry, or is not asked; what it has stays right.
TEST_F(AllocationFailureTest, ThePrefixCacheStaysWhole) {
  const auto prefix = std::make_shared<PrefixCache>(size_t{1} << 20);
  auto with = gemma_->WithPrefix(gemma_->MakePrefixView(prefix, {}));
  const Tokens system = RandomTokens(300, 1);
  size_t failed = 0, hits = 0;
  for (long n = 0; n < 240; n += kSanitized ? 8 : 2) {
    Tokens prompt = system;
    prompt.resize(40 + static_cast<size_t>(n) % 7 * 40);
    const Tokens end = RandomTokens(20, static_cast<uint32_t>(n % 5));
    prompt.insert(prompt.end(), end.begin(), end.end());
    const std::shared_ptr<Conversation> cache = NewCache();
    const Engine::Job job{cache, prompt, Options(1)};
    Tokens found;
    allocations_left = n * 11 % 1200;
    try {
      const auto stream = with->Start({&job, 1})[0];
      stream->WaitDone();
      allocations_left = -1;
      stream->Confirm();
      found = stream->Result().token_ids;
      hits += stream->Result().prefix.ram > 0;
    } catch (const std::exception&) {
      allocations_left = -1;
      ++failed;
      ASSERT_EQ(cache->length(), 0u) << n;
      continue;
    }
    ASSERT_EQ(found,
              gemma_->Generate(NewCache(), prompt, Options(1)).token_ids)
        << n;
  }
  EXPECT_GT(failed, kSanitized ? 6u : 25u);
  EXPECT_GT(hits, kSanitized ? 3u : 15u);
  gemma_ = with = nullptr;
  prefix->Clear();
  EXPECT_EQ(prefix->stats().ram.bytes, 0u);
  EXPECT_EQ(pool_->bytes_in_use(), 0u);
}

// A step of which only some groups of layers were committed leaves nothing that
// other tokens at its positions would find.
TEST_F(AllocationFailureTest, AStepIsCommittedOrNot) {
  // The step that fails takes a new block in each group.
  const Tokens prompt = RandomTokens(14, 1);
  const Tokens other = RandomTokens(30, 5);
  size_t failed = 0;
  for (long n = 0; n < 60; n += kSanitized ? 3 : 1) {
    const std::shared_ptr<Conversation> cache = NewCache();
    const Engine::Job job{cache, prompt, Options(0), true};
    const auto stream = gemma_->Start({&job, 1})[0];
    stream->NextEvent();
    while (!stream->waits_for_reader()) std::this_thread::yield();
    allocations_left = n;
    // None if the step that made it has failed at its end.
    const size_t read = stream->NextEvent() ? 2 : 1;
    while (!stream->done() && !stream->waits_for_reader()) {
      std::this_thread::yield();
    }
    allocations_left = -1;
    failed += stream->done();
    stream->Stop(TokenStream::Interrupt::kCancel);
    stream->WaitDone();
    Tokens all = cache->tokens();
    if (all.empty()) continue;
    ASSERT_EQ(all.size(), prompt.size() + read) << n;
    const Tokens found =
        gemma_->Generate(cache, other, Options(3)).token_ids;
    all.insert(all.end(), other.begin(), other.end());
    ASSERT_EQ(found, gemma_->Generate(NewCache(), all, Options(3)).token_ids)
        << n;
  }
  EXPECT_GT(failed, kSanitized ? 1u : 5u);
}

}  // namespace
}  // namespace gkv
