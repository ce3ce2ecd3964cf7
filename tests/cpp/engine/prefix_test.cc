// The prefix cache under the scheduler: every family, with what is computed
// once against what is computed cold.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "engine/engine.h"
#include "io/temp_folder.h"
#include "model/tiny_model.h"
#include "model/weights/packed_file.h"
#include "store/memory_store.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Streams = std::vector<std::shared_ptr<TokenStream>>;
constexpr size_t kVocab = 97;

Tokens Join(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// No token of these ends a turn, which 1 does.
Tokens Text(size_t count, uint32_t seed) {
  Tokens tokens = RandomTokens(count, seed);
  for (int32_t& token : tokens) token += token < 2 ? 2 : 0;
  return tokens;
}

GenerateOptions NoStop(size_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.ignore_eos = true;
  return options;
}

class PrefixTest : public ::testing::TestWithParam<std::string> {
 protected:
  void Load(const std::string& family,
            const SchedulerOptions& scheduler = {}) {
    const TinyOptions tiny = TinyFamily(family);
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    options.scheduler = scheduler;
    gemma_ = Engine::FromTensors(TinyConfig(tiny), source, options);
    view_ = View();
  }
  std::shared_ptr<PrefixView> View(const std::string& salt = "") {
    return gemma_->MakePrefixView(prefix_, AsBytes(salt));
  }
  std::shared_ptr<Conversation> NewCache(
      std::shared_ptr<BlockPool> pool = nullptr, KvDtype dtype = KvDtype::kBF16,
      size_t block_tokens = 16) {
    return CreateConversation(gemma_->config(), {.kv_dtype = dtype,
                                                 .block_tokens = block_tokens,
                                                 .pool = pool ? pool : pool_});
  }
  Engine::Job Job(const std::shared_ptr<Conversation>& cache,
                  const Tokens& prompt, size_t max_tokens,
                  PrefixMode mode = PrefixMode::kOn) {
    Engine::Job job{cache, prompt, NoStop(max_tokens)};
    job.prefix = {view_, mode, {}};
    return job;
  }
  GenerateResult Run(const std::shared_ptr<Conversation>& cache,
                     const Tokens& prompt, size_t max_tokens,
                     PrefixMode mode = PrefixMode::kOn) {
    const Engine::Job job = Job(cache, prompt, max_tokens, mode);
    const auto stream = gemma_->Start({&job, 1})[0];
    stream->WaitDone();
    stream->Confirm();
    return stream->Result();
  }
  std::vector<float> Logits(const std::shared_ptr<Conversation>& cache,
                            const Tokens& tokens, bool all,
                            const PrefixAccess& use) {
    std::vector<float> logits((all ? tokens.size() : 1) * kVocab);
    const auto stream = gemma_->StartRows(cache, tokens, RowOutput::kLogits,
                                          all, logits.data(), {}, use);
    stream->WaitDone();
    stream->Confirm();
    cached_ = stream->Result().cached_tokens;
    return logits;
  }

  void RandomRequests(const PrefixTiers& tiers);

  std::shared_ptr<BlockPool> pool_ = [] {
    auto pool = BlockPool::Create();
    pool->set_poison(true);
    return pool;
  }();
  std::shared_ptr<PrefixCache> prefix_ =
      std::make_shared<PrefixCache>(size_t{256} << 20);
  std::shared_ptr<Engine> gemma_;
  std::shared_ptr<PrefixView> view_;
  size_t cached_ = 0;
};

TEST_P(PrefixTest, APromptThatIsKnownIsNotComputedAgain) {
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  const GenerateResult first = Run(NewCache(), prompt, 5);
  EXPECT_EQ(first.cached_tokens, 0u);
  EXPECT_EQ(first.prefix.miss, PrefixMiss::kDivergent);
  const auto cache = NewCache();
  const GenerateResult second = Run(cache, prompt, 5);
  EXPECT_EQ(second.token_ids, first.token_ids);
  EXPECT_GE(second.prefix.ram, 256u) << "the last page boundary of the prompt";
  EXPECT_EQ(second.prefix.ram, second.cached_tokens);
  EXPECT_EQ(Run(NewCache(), prompt, 5).prefix.ram, 499u) << "asked for again";
  // The whole conversation, in another cache, and on.
  const Tokens all = cache->tokens();
  const GenerateResult third = Run(NewCache(), Join(all, Text(20, 2)), 5);
  EXPECT_EQ(third.prefix.ram, all.size() - 1);
  EXPECT_EQ(third.prefix.miss, PrefixMiss::kDivergent);
  // Modes.
  EXPECT_EQ(Run(NewCache(), prompt, 1, PrefixMode::kOff).prefix.ram, 0u);
  EXPECT_EQ(Run(NewCache(), prompt, 1, PrefixMode::kWrite).prefix.ram, 0u);
  const Tokens other = Text(500, 9);
  Run(NewCache(), other, 1, PrefixMode::kRead);
  EXPECT_EQ(Run(NewCache(), other, 1).prefix.ram, 0u);
}

TEST_P(PrefixTest, AShortPromptIsKnownTheSecondTime) {
  Load(GetParam());
  const Tokens prompt = Text(100, 1);
  const GenerateResult first = Run(NewCache(), prompt, 60);
  const GenerateResult second = Run(NewCache(), prompt, 60);
  EXPECT_EQ(second.prefix.ram, 99u);
  EXPECT_EQ(second.token_ids, first.token_ids);
}

TEST_P(PrefixTest, AnEditInTheMiddleComputesTheSecondHalf) {
  Load(GetParam());
  const Tokens prompt = Text(900, 1);
  Run(NewCache(), prompt, 1);
  const Tokens begin(prompt.begin(), prompt.begin() + 600);
  const Tokens edited = Join(begin, Text(300, 2));
  const GenerateResult cold = Run(NewCache(), edited, 5, PrefixMode::kOff);
  const GenerateResult found = Run(NewCache(), edited, 5);
  EXPECT_GE(found.prefix.ram, 512u);
  EXPECT_EQ(found.token_ids, cold.token_ids);
}

TEST_P(PrefixTest, LogitsOfAllPositionsTakeNothingOfTheirOwn) {
  Load(GetParam());
  const Tokens prompt = Text(400, 1);
  const PrefixAccess use{view_, PrefixMode::kOn, {}};
  const auto cold = Logits(NewCache(), prompt, true, {});
  EXPECT_EQ(Logits(NewCache(), prompt, true, use), cold);
  EXPECT_EQ(cached_, 0u);
  EXPECT_EQ(Logits(NewCache(), prompt, true, use), cold);
  EXPECT_EQ(cached_, 0u);
  const std::vector<float> last(cold.end() - kVocab, cold.end());
  EXPECT_EQ(Logits(NewCache(), prompt, false, use), last);
  EXPECT_GE(cached_, 256u);
}

TEST_P(PrefixTest, TheCallersBoundaryIsAPoint) {
  Load(GetParam());
  const Tokens system = Text(300, 1);
  Engine::Job job = Job(NewCache(), {}, 1);
  const Tokens prompt = Join(system, Text(200, 2));
  job.prompt = prompt;
  job.prefix.boundaries = {290};
  gemma_->Start({&job, 1})[0]->WaitDone();
  Tokens head = system;
  head.resize(290);
  EXPECT_EQ(Run(NewCache(), Join(head, Text(100, 3)), 1).prefix.ram, 290u);
}

// The second one that parts from what is known leaves a point there.
TEST_P(PrefixTest, WhereASecondOnePartsAThirdGoesOn) {
  Load(GetParam());
  const Tokens system = Text(200, 1);
  std::vector<size_t> hits;
  for (uint32_t i = 0; i < 3; ++i) {
    hits.push_back(Run(NewCache(), Join(system, Text(300, 10 + i)), 1)
                       .prefix.ram);
  }
  EXPECT_EQ(hits[0], 0u);
  EXPECT_EQ(hits[2], 200u);
}

TEST_P(PrefixTest, IdenticalPromptsAtOnceAreReadOnce) {
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  const auto cold = NewCache();
  const GenerateResult expected = Run(cold, prompt, 8, PrefixMode::kOff);
  std::vector<Engine::Job> jobs;
  for (size_t i = 0; i < 32; ++i) jobs.push_back(Job(NewCache(), prompt, 8));
  const size_t before = gemma_->stats().steps;
  const Streams streams = gemma_->Start(jobs);
  size_t computed = 0;
  for (const auto& stream : streams) {
    stream->WaitDone();
    EXPECT_EQ(stream->Result().token_ids, expected.token_ids);
    computed += prompt.size() - stream->Result().cached_tokens;
  }
  EXPECT_EQ(computed, 500u + 31u);
  EXPECT_LE(gemma_->stats().steps - before, 500u / 64 + 2 + 16);
}

TEST_P(PrefixTest, ThoseThatFollowWaitUpToTheCommonPrefixOnly) {
  Load(GetParam());
  const Tokens system = Text(300, 1);
  std::vector<Tokens> prompts;
  std::vector<Engine::Job> jobs;
  for (uint32_t i = 0; i < 6; ++i) {
    prompts.push_back(Join(system, Text(100 + 10 * i, 20 + i)));
  }
  for (const Tokens& prompt : prompts) {
    jobs.push_back(Job(NewCache(), prompt, 4));
  }
  const Streams streams = gemma_->Start(jobs);
  for (size_t i = 0; i < streams.size(); ++i) {
    streams[i]->WaitDone();
    EXPECT_EQ(streams[i]->Result().prefix.ram, i == 0 ? 0u : 300u);
    EXPECT_EQ(streams[i]->Result().token_ids,
              Run(NewCache(), prompts[i], 4, PrefixMode::kOff).token_ids);
  }
}

TEST_P(PrefixTest, ACancelledLeaderLeavesWhatItComputed) {
  SchedulerOptions scheduler;
  scheduler.step_rows = 8;
  Load(GetParam(), scheduler);
  const Tokens prompt = Text(900, 1);
  const Engine::Job leader = Job(NewCache(), prompt, 4);
  const auto first = gemma_->Start({&leader, 1})[0];
  const Engine::Job follower = Job(NewCache(), prompt, 4);
  const auto second = gemma_->Start({&follower, 1})[0];
  while (gemma_->stats().steps < 30) std::this_thread::yield();
  first->Stop(TokenStream::Interrupt::kAbort);
  second->WaitDone();
  EXPECT_GE(second->Result().prefix.ram, 8u * 20);
  EXPECT_EQ(second->Result().token_ids,
            Run(NewCache(), prompt, 4, PrefixMode::kOff).token_ids);
}

// The leader's batch fails while it reads: nobody waits for it for ever.
TEST_P(PrefixTest, ALeaderWhoseBatchFailsHoldsUpNobody) {
  SchedulerOptions scheduler;
  scheduler.step_rows = 8;
  Load(GetParam(), scheduler);
  const Tokens prompt = Text(900, 1);
  std::promise<void> came;
  std::atomic<int> calls = 0;
  Engine::Job batch[] = {Job(NewCache(), prompt, 4),
                         Job(NewCache(), prompt, 9)};
  const Tokens few = Text(4, 2);
  batch[1].prompt = few;
  batch[1].options.logits_processor =
      [&, come = came.get_future().share()](auto...) {
        come.wait();
        if (++calls == 3) throw std::domain_error("no");
      };
  const Streams streams = gemma_->Start(batch);
  const Engine::Job job = Job(NewCache(), prompt, 4);
  const auto follower = gemma_->Start({&job, 1})[0];
  came.set_value();
  follower->WaitDone();
  EXPECT_THROW((void)streams[0]->Result(), std::domain_error);
  EXPECT_EQ(follower->Result().token_ids,
            Run(NewCache(), prompt, 4, PrefixMode::kOff).token_ids);
}

// One model, with and without, on one scheduler.
TEST_P(PrefixTest, AModelWithAPrefixCacheUsesItWhereOptionsLetIt) {
  Load(GetParam());
  const auto with = gemma_->WithPrefix(view_);
  const Tokens prompt = Text(400, 1);
  const auto run = [&](Engine& gemma, PrefixMode mode) {
    GenerateOptions options = NoStop(2);
    options.prefix_cache = mode;
    return gemma.Generate(NewCache(), prompt, options).prefix.ram;
  };
  EXPECT_EQ(run(*gemma_, PrefixMode::kOn), 0u);
  EXPECT_EQ(run(*with, PrefixMode::kRead), 0u);
  EXPECT_EQ(run(*with, PrefixMode::kOn), 0u);
  EXPECT_EQ(run(*with, PrefixMode::kOff), 0u);
  EXPECT_GE(run(*with, PrefixMode::kOn), 256u);
  EXPECT_EQ(run(*gemma_, PrefixMode::kOn), 0u);
  EXPECT_EQ(with->stats().steps, gemma_->stats().steps);
  // It lives for as long as one of them.
  gemma_ = with;
  EXPECT_GE(run(*with, PrefixMode::kOn), 256u);
}

TEST_P(PrefixTest, TenantsDoNotWaitForEachOther) {
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  Engine::Job jobs[] = {Job(NewCache(), prompt, 2), Job(NewCache(), prompt, 2)};
  jobs[1].prefix.view = View("tenant");
  const Streams streams = gemma_->Start(jobs);
  for (const auto& stream : streams) {
    stream->WaitDone();
    EXPECT_EQ(stream->Result().cached_tokens, 0u);
  }
}

// A pool that holds hardly more than one conversation: the index never makes a
// request fail that would run without it.
TEST_P(PrefixTest, AFullPoolGoesToTheRequests) {
  Load(GetParam());
  const Tokens prompt = Text(600, 1);
  const auto requests = [&](size_t bytes, PrefixMode mode) {
    const auto pool = BlockPool::Create(bytes);
    Tokens tokens;
    for (uint32_t i = 0; i < 2; ++i) {
      tokens = Join(tokens, Run(NewCache(pool), prompt, 60, mode).token_ids);
      Run(NewCache(pool), Text(500, 100 + i), 10, mode);
      const auto cache = NewCache(pool);
      Run(cache, Text(300, 200 + i), 10, mode);
      tokens = Join(tokens, Run(cache, Text(200, i), 10, mode).token_ids);
    }
    return tokens;
  };
  size_t bytes = NewCache()->layout().bytes_at(300);
  Tokens expected;
  while (expected.empty()) {
    try {
      expected = requests(bytes, PrefixMode::kOff);
    } catch (const CacheFull&) {
      bytes += bytes / 16;
    }
  }
  EXPECT_EQ(requests(bytes, PrefixMode::kOn), expected);
}

// Random requests of all sorts: conversations that go on, are cut, forked,
// cancelled, that begin alike or not, several at once, in every dtype and block
// size, with an index and a pool that are too small. Every one gives what it
// gives alone and cold.
void PrefixTest::RandomRequests(const PrefixTiers& tiers) {
  size_t hits = 0, below = 0;
  const size_t& found = tiers.empty() ? hits : below;
  // How many tokens the first two seeds are to find, each; a full pool, as the
  // third one's, may leave none. What tiers give in time depends on the machine:
  // some rounds more where these have not found enough.
  const size_t enough = (tiers.empty() ? 60 : 20) / (kSanitized ? 2 : 1);
  for (uint32_t seed = 0; seed < 3; ++seed) {
    const auto goes_on = [&](size_t round) {
      const bool lacks = seed < 2 && found <= (seed + 1) * enough;
      return round < (kSanitized ? 6 : 12) || (lacks && round < 120);
    };
    Load(GetParam());
    size_t ram = size_t{1} << (seed == 0 ? 28 : 20);
    // Everything goes through the tiers then.
    if (!tiers.empty()) ram = seed == 0 ? size_t{1} << 17 : 0;
    // A tiny model computes anything sooner than a busy machine loads it.
    prefix_ = std::make_shared<PrefixCache>(ram, tiers,
                                            PrefixTierOptions{.weighs = false});
    view_ = View();
    const auto pool = BlockPool::Create(seed == 2 ? size_t{9} << 20 : 0);
    pool->set_poison(true);
    std::mt19937 rng(seed);
    constexpr KvDtype kDtypes[] = {KvDtype::kF32, KvDtype::kBF16,
                                   KvDtype::kInt8};
    std::vector<std::shared_ptr<Conversation>> caches;
    for (size_t round = 0; goes_on(round); ++round) {
      std::vector<Tokens> prompts;
      std::vector<std::shared_ptr<Conversation>> used, cold;
      for (size_t i = rng() % 3; i < 3; ++i) {
        std::shared_ptr<Conversation> cache;
        if (!caches.empty() && rng() % 2 == 0) {
          const size_t which = rng() % caches.size();
          cache = caches[which];
          if (rng() % 3 == 0) cache = caches[which] = cache->Fork();
          // One that is in this round already stays as it is.
          if (std::find(used.begin(), used.end(), cache) != used.end()) continue;
          if (rng() % 2 == 0) cache->Truncate(rng() % (cache->length() + 1));
        } else {
          cache = NewCache(pool, kDtypes[seed == 0 ? rng() % 3 : 1],
                           16u << (rng() % 4));
          caches.push_back(cache);
        }
        if (cache->length() > 600) continue;
        Tokens prompt;
        if (cache->length() == 0) {
          prompt = Text(400, rng() % 3);
          prompt.resize(1 + rng() % 400);
        }
        prompts.push_back(Join(prompt, Text(1 + rng() % 60, rng() % 3)));
        used.push_back(cache);
        cold.push_back(NewCache(BlockPool::Create(), cache->layout().dtype(),
                                cache->layout().block_tokens()));
        cold.back()->Append(cold.back()->Lock(), cache->tokens());
      }
      std::vector<Engine::Job> jobs;
      for (size_t i = 0; i < used.size(); ++i) {
        jobs.push_back(Job(used[i], prompts[i], rng() % 12));
        jobs.back().streamed = rng() % 4 == 0;
        jobs.back().prefix.mode = static_cast<PrefixMode>(1 + rng() % 3);
      }
      const Streams streams = gemma_->Start(jobs);
      for (size_t i = 0; i < streams.size(); ++i) {
        if (jobs[i].streamed) {
          for (size_t read = rng() % 4; read > 0; --read) {
            streams[i]->NextEvent(std::chrono::milliseconds(100));
          }
          streams[i]->Stop(TokenStream::Interrupt::kCancel);
        }
      }
      for (size_t i = 0; i < streams.size(); ++i) {
        streams[i]->WaitDone();
        streams[i]->Confirm();
        const GenerateResult& result = streams[i]->Result();
        hits += result.prefix.ram;
        below += result.prefix.total() - result.prefix.ram;
        if (jobs[i].streamed) {
          // What a cancel keeps is told elsewhere.
          cold[i] = NewCache(BlockPool::Create(), used[i]->layout().dtype());
          cold[i]->Append(cold[i]->Lock(), used[i]->tokens());
        } else {
          const GenerateResult expected = Run(
              cold[i], prompts[i], result.token_ids.size(), PrefixMode::kOff);
          ASSERT_EQ(result.token_ids, expected.token_ids);
        }
        ASSERT_EQ(used[i]->tokens(), cold[i]->tokens());
        // All bits of what follows.
        const Tokens next = Text(2, rng());
        ASSERT_EQ(Logits(used[i]->Fork(), next, true, {}),
                  Logits(cold[i], next, true, {}))
            << GetParam() << " seed " << seed << " round " << round;
      }
      if (caches.size() > 5) caches.erase(caches.begin());
      if (round % 2 == 0) prefix_->Flush();
    }
    caches.clear();
    gemma_ = nullptr;  // and what its scheduler has yet to let go of
    EXPECT_LE(prefix_->stats().ram.bytes, prefix_->index().budget_bytes());
    prefix_->Close();
    prefix_->Clear();
    EXPECT_EQ(pool->blocks_in_use(), 0u);
  }
  EXPECT_GT(found, 2 * enough);
}

TEST_P(PrefixTest, RandomRequestsGiveWhatTheyGiveCold) { RandomRequests({}); }

TEST_P(PrefixTest, RandomRequestsThroughTiers) {
  RandomRequests({std::make_shared<MemoryStore>("shared", true),
                  std::make_shared<MemoryStore>("disk")});
}

TEST_P(PrefixTest, AnotherProcessFindsWhatThisOneWrote) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  prefix_ = std::make_shared<PrefixCache>(size_t{1} << 26, PrefixTiers{disk});
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  const GenerateResult first = Run(NewCache(), prompt, 5);
  prefix_->Flush();
  prefix_ = std::make_shared<PrefixCache>(size_t{1} << 26, PrefixTiers{disk});
  view_ = View();
  const GenerateResult second = Run(NewCache(), prompt, 5);
  EXPECT_EQ(second.token_ids, first.token_ids);
  EXPECT_EQ(second.prefix.disk, 256u);
  EXPECT_EQ(second.prefix.total(), second.cached_tokens);
  const GenerateResult third = Run(NewCache(), prompt, 5);
  EXPECT_EQ(third.token_ids, first.token_ids);
  EXPECT_EQ(third.prefix.ram, third.cached_tokens);
}

// Packed weights are compared with their sums where a step first uses them: what
// is computed from others is committed nowhere.
TEST_P(PrefixTest, NothingOfDamagedWeightsIsWritten) {
  const TempFolder folder;
  const TinyOptions tiny = TinyFamily(GetParam());
  MemorySource source = TinyTensors(tiny);
  LoadOptions options;
  options.threads = 2;
  options.packed_folder = folder.path();
  const auto load = [&] {
    return Engine::FromTensors(TinyConfig(tiny), source, options);
  };
  const std::string path = load()->packed_report().path;
  std::string bytes = ReadWhole(path);
  {
    const std::string name = path.substr(path.rfind('/') + 1);
    const PackedFile file(path, *FingerprintOf(name));
    bytes[file.Find("blk.1.ffn_down.weight")->offset] ^= 1;
  }
  WriteWhole(path, bytes);
  const auto disk = std::make_shared<MemoryStore>("disk");
  prefix_ = std::make_shared<PrefixCache>(size_t{1} << 26, PrefixTiers{disk});
  gemma_ = load();
  view_ = View();
  EXPECT_THROW(Run(NewCache(), Text(300, 1), 3), CorruptFile);
  prefix_->Flush();
  EXPECT_EQ(disk->stats().writes, 0u);
  EXPECT_EQ(prefix_->stats().ram.published, 0u);
  gemma_ = load();
  Run(NewCache(), Text(300, 1), 3);
  prefix_->Flush();
  EXPECT_GT(disk->stats().writes, 0u);
}

// One waits for a tier; others go on, and it can be stopped.
TEST_P(PrefixTest, AFetchHoldsUpNobodyElse) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  prefix_ = std::make_shared<PrefixCache>(
      size_t{1} << 26, PrefixTiers{disk},
      PrefixTierOptions{.time_out = std::chrono::minutes(10)});
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  const Tokens expected = Run(NewCache(), prompt, 5).token_ids;
  prefix_->Flush();
  prefix_->Clear(PrefixTier::kRam);
  disk->Hang();
  view_->set_seconds_per_token(1e9);  // worth any wait
  const Engine::Job job = Job(NewCache(), prompt, 5);
  const auto waiting = gemma_->Start({&job, 1})[0];
  while (disk->hanging() == 0) std::this_thread::yield();
  EXPECT_EQ(Run(NewCache(), Text(40, 2), 3, PrefixMode::kOff).token_ids.size(),
            3u);
  EXPECT_FALSE(waiting->done());
  // One is cancelled, one runs out of time.
  Engine::Job others[] = {Job(NewCache(), prompt, 5),
                          Job(NewCache(), prompt, 5)};
  const auto cancelled = gemma_->Start({&others[0], 1})[0];
  others[1].options.deadline = 0.02;
  const auto late = gemma_->Start({&others[1], 1})[0];
  cancelled->Stop(TokenStream::Interrupt::kCancel);
  cancelled->WaitDone();
  late->WaitDone();
  EXPECT_EQ(cancelled->Result().finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(late->Result().finish_reason, FinishReason::kDeadline);
  EXPECT_FALSE(waiting->done());
  disk->Release();
  waiting->WaitDone();
  EXPECT_EQ(waiting->Result().token_ids, expected);
  EXPECT_EQ(waiting->Result().prefix.disk, 256u);
}

TEST_P(PrefixTest, ADeadTierCostsOneTimeOut) {
  const auto remote = std::make_shared<MemoryStore>("remote");
  prefix_ = std::make_shared<PrefixCache>(
      size_t{1} << 26, PrefixTiers{remote},
      PrefixTierOptions{.time_out = std::chrono::milliseconds(100)});
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  // Asks the tier nothing: it may be late on a busy machine.
  const Tokens expected =
      Run(NewCache(), prompt, 5, PrefixMode::kWrite).token_ids;
  prefix_->Flush();
  prefix_->Clear(PrefixTier::kRam);
  remote->Hang();
  const auto run = [&] {
    const GenerateResult result =
        Run(NewCache(), prompt, 5, PrefixMode::kRead);
    EXPECT_EQ(result.token_ids, expected);
    EXPECT_EQ(result.cached_tokens, 0u);
  };
  // The loader's thread may be too late to ask the tier at all.
  do {
    run();
  } while (prefix_->stats().loader.tiers[0].timeouts == 0);
  const size_t timeouts = prefix_->stats().loader.timeouts;
  EXPECT_GE(timeouts, 1u);
  run();
  run();
  EXPECT_EQ(prefix_->stats().loader.timeouts, timeouts);
  EXPECT_EQ(prefix_->stats().loader.tiers[0].timeouts, 1u);
  while (remote->hanging() == 0) std::this_thread::yield();
  EXPECT_EQ(remote->hanging(), 1u);
  remote->Release();
}

// The model goes while a fetch is on its way.
TEST_P(PrefixTest, AModelMayGoBeforeItsPrefixCache) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  prefix_ = std::make_shared<PrefixCache>(size_t{1} << 26, PrefixTiers{disk});
  Load(GetParam());
  const Tokens prompt = Text(500, 1);
  Run(NewCache(), prompt, 5);
  prefix_->Clear(PrefixTier::kRam);
  disk->set_delay(std::chrono::milliseconds(20));
  const Engine::Job job = Job(NewCache(), prompt, 5);
  const auto stream = gemma_->Start({&job, 1})[0];
  view_ = nullptr;
  gemma_ = nullptr;
  stream->WaitDone();
  EXPECT_TRUE(stream->done());
}

TEST_P(PrefixTest, ManyCallersShareOneIndex) {
  Load(GetParam());
  prefix_ = std::make_shared<PrefixCache>(size_t{2} << 20);
  view_ = View();
  std::vector<Tokens> prompts, expected;
  for (uint32_t i = 0; i < 12; ++i) {
    prompts.push_back(Join(Text(300, i % 3), Text(10 + 17 * i, 50 + i)));
    expected.push_back(
        Run(NewCache(), prompts.back(), 6, PrefixMode::kOff).token_ids);
  }
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (size_t i = 0; i < 12; ++i) {
        const size_t which = rng() % prompts.size();
        EXPECT_EQ(Run(NewCache(), prompts[which], 6).token_ids,
                  expected[which]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Families, PrefixTest,
                         ::testing::ValuesIn(CheckedFamilies()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gkv
