// Many callers do random things to their conversations on one model at the
// same time. What a caller does is a function of its seed alone, so that it can
// be done alone first: every result must be the same, bit for bit.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/sanitized.h"
#include "engine/engine.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using CachePtr = std::shared_ptr<Conversation>;

constexpr size_t kVocab = 97;
constexpr size_t kCapacity = 260;
constexpr size_t kMaxConversations = 5;

void Wait(TokenStream& request) {
  while (!request.WaitDone(std::chrono::seconds(1))) {
  }
}

std::vector<float> Logits(Engine& gemma, const CachePtr& cache,
                          const Tokens& tokens, bool all) {
  std::vector<float> logits((all ? tokens.size() : 1) * kVocab);
  const auto request = gemma.StartLogits(cache, tokens, all, logits.data());
  Wait(*request);
  request->Result();
  return logits;
}

CachePtr Restored(const Conversation& cache, bool checkpoints,
                  const std::shared_ptr<BlockPool>& pool) {
  CacheOptions options;
  options.block_tokens = 16;
  options.pool = pool;
  return Conversation::FromBytes(cache.ToBytes(checkpoints), options);
}

// One caller. Run() performs `steps` random operations; log() has one entry
// for each result.
class Caller {
 public:
  Caller(Engine& gemma, const Conversation& base,
         std::shared_ptr<BlockPool> pool, uint32_t seed)
      : gemma_(gemma), pool_(std::move(pool)), rng_(seed) {
    Add(base.Fork());
  }

  void Run(size_t steps) {
    for (size_t i = 0; i < steps; ++i) Step();
    // What all conversations hold in the end, computed on.
    for (size_t i = 0; i < conversations_.size(); ++i) {
      LogTokens(conversations_[i]->tokens());
      LogFloats(
          Logits(gemma_, CachePtr(conversations_[i]->Fork()), {7}, false));
    }
  }

  const std::vector<Hash128>& log() const { return log_; }

  // For onlookers: any of the conversations, also a busy one.
  CachePtr Peek(size_t index) const {
    const std::lock_guard lock(mutex_);
    return conversations_[index % conversations_.size()];
  }

 private:
  size_t Below(size_t limit) { return rng_() % limit; }
  Tokens Prompt(size_t limit) {
    Tokens tokens(1 + Below(limit));
    for (int32_t& token : tokens) token = static_cast<int32_t>(Below(kVocab));
    return tokens;
  }

  void Log(std::span<const uint8_t> bytes) { log_.push_back(HashBytes(bytes)); }
  void LogFloats(const std::vector<float>& values) {
    Log({reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
  }
  void LogTokens(const Tokens& tokens) {
    Log({reinterpret_cast<const uint8_t*>(tokens.data()), tokens.size() * 4});
  }

  void Add(CachePtr cache) {
    const std::lock_guard lock(mutex_);
    conversations_.push_back(std::move(cache));
  }
  void Replace(size_t index, CachePtr cache) {
    const std::lock_guard lock(mutex_);
    conversations_[index] = std::move(cache);
  }

  GenerateOptions Options() {
    GenerateOptions options;
    options.max_tokens = 1 + Below(12);
    options.temperature = Below(2) ? 1.1f : 0.0f;
    options.top_k = Below(2) ? 20 : 0;
    options.seed = rng_();
    options.logprobs = true;
    if (gemma_.has_draft()) options.speculate = Speculate::kDraft;
    return options;
  }

  void Step() {
    const size_t index = Below(conversations_.size());
    const CachePtr cache = conversations_[index];
    // Room for any operation below.
    if (cache->length() > kCapacity - 80) cache->Truncate(Below(120));
    switch (Below(14)) {
      case 0:
        LogFloats(Logits(gemma_, cache, Prompt(40), false));
        break;
      case 1:
        LogFloats(Logits(gemma_, cache, Prompt(20), true));
        break;
      case 2:
      case 3:
        Generate(cache);
        break;
      case 4:
        GenerateAndStop(cache);
        break;
      case 5:
        Interrupt(cache, TokenStream::Interrupt::kCancel);
        break;
      case 6:
        Interrupt(cache, TokenStream::Interrupt::kAbort);
        break;
      case 7:
        if (conversations_.size() < kMaxConversations) Add(cache->Fork());
        break;
      case 8:
        cache->Truncate(Below(cache->length() + 1));
        break;
      case 9:
        Replace(index, Restored(*cache, Below(2) == 0, pool_));
        break;
      case 10:
        TooLong(cache);
        break;
      case 11:
        cache->MakeCheckpoint();
        break;
      case 12:
        RewindToACheckpoint(cache);
        break;
      default:
        Batch();
        break;
    }
  }

  void LogResult(const GenerateResult& result) {
    LogTokens(result.token_ids);
    LogFloats(result.logprobs);
  }

  void Generate(const CachePtr& cache) {
    LogResult(gemma_.Generate(cache, Prompt(30), Options()));
  }

  // Cancelled by the reader after a fixed number of tokens.
  void GenerateAndStop(const CachePtr& cache) {
    const Tokens prompt = Prompt(10);
    size_t left = 1 + Below(6);
    LogResult(
        gemma_.Generate(cache, prompt, Options(), [&](const TokenEvent& event) {
          return event.token_id < 0 || --left > 0;
        }));
  }

  // Interrupted from outside, sooner or later: what is there then is the
  // beginning of what would have come, and it is taken back again.
  void Interrupt(const CachePtr& cache, TokenStream::Interrupt how) {
    const Tokens before = cache->tokens();
    const Tokens prompt = Prompt(60);
    GenerateOptions options = Options();
    Tokens whole = before;
    whole.insert(whole.end(), prompt.begin(), prompt.end());
    const Tokens sampled =
        gemma_.Generate(CachePtr(cache->Fork()), prompt, options).token_ids;
    whole.insert(whole.end(), sampled.begin(), sampled.end());
    const Engine::Job job{cache, prompt, options, false};
    const auto request = gemma_.Start({&job, 1})[0];
    // Any moment.
    std::this_thread::sleep_for(std::chrono::microseconds(Below(2000)));
    if (how == TokenStream::Interrupt::kAbort) {
      request->Abort();
    } else {
      request->Stop(how);
    }
    Wait(*request);
    const Tokens now = cache->tokens();
    if (how == TokenStream::Interrupt::kAbort) {
      EXPECT_EQ(now, before);
    } else {
      EXPECT_GE(now.size(), before.size() + prompt.size());
      EXPECT_LE(now.size(), whole.size());
      EXPECT_TRUE(std::equal(now.begin(), now.end(), whole.begin()));
    }
    cache->Truncate(before.size());
    LogTokens(cache->tokens());
  }

  // Which checkpoints are there depends on interrupts that came or did not, so
  // the transcript is put back afterwards.
  void RewindToACheckpoint(const CachePtr& cache) {
    const CachePtr fork(cache->Fork());
    const std::vector<size_t> lengths = fork->CheckpointLengths();
    if (!lengths.empty()) {
      const size_t length = lengths.back();
      EXPECT_EQ(fork->Truncate(length).replay_tokens, 0u);
      const Tokens tokens = cache->tokens();
      fork->Append(fork->Lock(), std::span(tokens).subspan(length));
    }
    LogFloats(Logits(gemma_, fork, {11}, false));
  }

  void TooLong(const CachePtr& cache) {
    const Tokens before = cache->tokens();
    const Tokens prompt(kCapacity + 1, 3);
    EXPECT_THROW(gemma_.Generate(cache, prompt, Options()), CacheFull);
    EXPECT_EQ(cache->tokens(), before);
  }

  // Two conversations in the same steps.
  void Batch() {
    if (conversations_.size() < 2) return;
    const CachePtr caches[] = {conversations_[0], conversations_[1]};
    for (const CachePtr& cache : caches) {
      if (cache->length() > kCapacity - 80) cache->Truncate(Below(120));
    }
    const Tokens prompts[] = {Prompt(20), Prompt(3)};
    const GenerateOptions options[] = {Options(), Options()};
    const Engine::Job jobs[] = {{caches[0], prompts[0], options[0], false},
                                {caches[1], prompts[1], options[1], false}};
    for (const auto& request : gemma_.Start(jobs)) {
      Wait(*request);
      LogResult(request->Result());
    }
  }

  Engine& gemma_;
  const std::shared_ptr<BlockPool> pool_;
  std::mt19937 rng_;
  std::vector<Hash128> log_;
  mutable std::mutex mutex_;  // guards the table, not the conversations
  std::vector<CachePtr> conversations_;
};

std::shared_ptr<Engine> Load(const TinyOptions& tiny, size_t threads) {
  MemorySource source = TinyTensors(tiny);
  LoadOptions options;
  options.threads = threads;
  options.scheduler.always_guess = true;
  return Engine::FromTensors(TinyConfig(tiny), source, options);
}

// Forks, saves and restores conversations of others while they are in use.
void LookOn(Engine& gemma, const std::vector<std::unique_ptr<Caller>>& callers,
            const std::shared_ptr<BlockPool>& pool,
            const std::atomic<bool>& stop) {
  std::mt19937 rng(99);
  while (!stop) {
    const CachePtr cache = callers[rng() % callers.size()]->Peek(rng());
    const CachePtr fork(cache->Fork());
    const CachePtr restored = Restored(*fork, true, pool);
    ASSERT_EQ(restored->tokens(), fork->tokens());
    if (fork->length() >= kCapacity) continue;
    ASSERT_EQ(Logits(gemma, restored, {5}, false),
              Logits(gemma, fork, {5}, false));
  }
}

// With `draft`, a model of this shape guesses for those that run together.
void Stress(const TinyOptions& tiny, KvDtype dtype, size_t num_callers,
            size_t steps, const TinyOptions* draft = nullptr) {
  const auto pool = BlockPool::Create();
  pool->set_poison(true);
  const auto run = [&](size_t threads, bool together) {
    auto gemma = Load(tiny, threads);
    if (draft != nullptr && together) {
      gemma = gemma->WithDraft(Load(*draft, 1));
    }
    CacheOptions options;
    options.capacity_tokens = kCapacity;
    options.block_tokens = 16;
    options.kv_dtype = dtype;
    options.pool = pool;
    const CachePtr base = CreateConversation(gemma->config(), options);
    Logits(*gemma, base, RandomTokens(70, 1), false);
    std::vector<std::unique_ptr<Caller>> callers;
    for (size_t i = 0; i < num_callers; ++i) {
      callers.push_back(std::make_unique<Caller>(
          *gemma, *base, pool, static_cast<uint32_t>(100 + i)));
    }
    std::atomic<bool> stop{false};
    std::vector<std::thread> working;
    std::thread looking;
    if (together) {
      looking = std::thread([&] { LookOn(*gemma, callers, pool, stop); });
    }
    for (const auto& caller : callers) {
      if (together) {
        working.emplace_back([&, steps] { caller->Run(steps); });
      } else {
        caller->Run(steps);
      }
    }
    for (std::thread& thread : working) thread.join();
    stop = true;
    if (looking.joinable()) looking.join();
    std::vector<std::vector<Hash128>> logs;
    for (const auto& caller : callers) logs.push_back(caller->log());
    return logs;
  };
  const auto alone = run(1, false);
  const auto together = run(3, true);
  for (size_t i = 0; i < num_callers; ++i) {
    EXPECT_GE(alone[i].size(), steps / 2);
    EXPECT_EQ(alone[i], together[i]) << "caller " << i;
  }
  EXPECT_EQ(pool->blocks_in_use(), 0u);
  EXPECT_EQ(pool->bytes_in_use(), 0u);
}

constexpr size_t kSteps = kSanitized ? 24 : 60;

TEST(StressTest, CallersGetWhatTheyGetAlone) {
  Stress({}, KvDtype::kBF16, 6, kSteps);
}

// Windows of 5: rewinding replays, and replays run into each other.
TEST(StressTest, CallersGetWhatTheyGetAloneWithAShortWindow) {
  TinyOptions tiny;
  tiny.window = 5;
  tiny.seed = 2;
  Stress(tiny, KvDtype::kInt8, 6, kSteps);
}

TEST(StressTest, CallersGetWhatTheyGetAloneInFloat32) {
  TinyOptions tiny = TypesAround();
  tiny.window = 17;
  Stress(tiny, KvDtype::kF32, 4, kSteps / 2);
}

// States instead of keys and values: rewinding goes to checkpoints, or to 0.
TEST(StressTest, CallersGetWhatTheyGetAloneWithRecurrentLayers) {
  TinyOptions tiny = TypesAround(TinyFamily("recurrentgemma"));
  tiny.window = 17;
  Stress(tiny, KvDtype::kBF16, 4, kSteps / 2);
}

// A draft that is always right, and one that hardly ever is.
TEST(StressTest, CallersGetWhatTheyGetAloneWithADraft) {
  TinyOptions tiny, other;
  tiny.window = 17;
  other.seed = 5;
  other.num_layers = 2;
  Stress(tiny, KvDtype::kBF16, 4, kSteps / 5, &tiny);
  Stress(tiny, KvDtype::kBF16, 4, kSteps / 5, &other);
}

}  // namespace
}  // namespace gkv
