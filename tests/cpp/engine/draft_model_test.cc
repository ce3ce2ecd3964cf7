// Draft models as requests meet them: through a Gemma, on its scheduler.

#include "engine/draft_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "engine/engine.h"
#include "engine/random_requests.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Streams = std::vector<std::shared_ptr<TokenStream>>;

std::shared_ptr<Engine> LoadTiny(
    const TinyOptions& tiny, const SchedulerOptions& scheduler = {},
    std::optional<TensorType> quantize = std::nullopt) {
  MemorySource source = TinyTensors(tiny);
  LoadOptions options;
  options.threads = 2;
  options.scheduler = scheduler;
  options.quantize = quantize;
  const std::shared_ptr<Engine> gemma =
      Engine::FromTensors(TinyConfig(tiny), source, options);
  std::vector<std::string> texts;
  for (size_t i = 0; i < kTinyVocab; ++i) {
    texts.push_back("<" + std::to_string(i) + ">");
  }
  gemma->set_token_text(std::make_shared<TokenText>(
      std::vector<std::string_view>(texts.begin(), texts.end())));
  return gemma;
}

SchedulerOptions Always() {
  SchedulerOptions options;
  options.always_guess = true;
  return options;
}

GenerateOptions Drafted(GenerateOptions options) {
  options.speculate = Speculate::kDraft;
  return options;
}

GenerateOptions NoStop(size_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.ignore_eos = true;
  return options;
}

class DraftModelTest : public ::testing::Test {
 protected:
  // A float target, and the same weights in 8 bits as a draft.
  void Load(const SchedulerOptions& scheduler = Always(),
            const std::string& family = "gemma3") {
    const TinyOptions tiny = TinyFamily(family);
    draft_ = LoadTiny(tiny, {}, TensorType::kQ8_0);
    gemma_ = LoadTiny(tiny, scheduler)->WithDraft(draft_);
  }
  std::shared_ptr<Conversation> NewCache(size_t capacity = 0) {
    return CreateConversation(
        gemma_->config(),
        {.capacity_tokens = capacity, .block_tokens = 16, .pool = pool_});
  }

  std::shared_ptr<BlockPool> pool_ = [] {
    auto pool = BlockPool::Create();
    pool->set_poison(true);
    return pool;
  }();
  std::shared_ptr<Engine> draft_, gemma_;
};

TEST_F(DraftModelTest, WhatItCannotBe) {
  Load();
  const auto refused = [&](const std::shared_ptr<const Engine>& draft) {
    try {
      gemma_->WithDraft(draft);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused(gemma_).find("the model itself"), std::string::npos);
  EXPECT_NE(refused(gemma_->WithPrefix(nullptr)).find("the model itself"),
            std::string::npos);
  TinyOptions other = TinyFamily("gemma3");
  other.change = [](ModelConfig& config) { config.vocab_size = 101; };
  EXPECT_NE(refused(LoadTiny(other)).find("a vocabulary of 101 tokens, "
                                          "expected that of the model, of 97"),
            std::string::npos);
  std::vector<std::string_view> texts(kTinyVocab, "x");
  const auto other_text = LoadTiny(TinyFamily("gemma3"));
  other_text->set_token_text(std::make_shared<TokenText>(texts));
  EXPECT_NE(refused(other_text).find("other text"), std::string::npos);
  EXPECT_NE(refused(LoadTiny(TinyFamily("gemma-embedding"))).find("embeddings"),
            std::string::npos);
  // Nor is there anything to guess for one that generates nothing.
  gemma_ = LoadTiny(TinyFamily("gemma-embedding"));
  EXPECT_NE(refused(draft_).find("holds no conversation"), std::string::npos);
  Load();
  // None is one that must not be asked for.
  const auto without = gemma_->WithDraft(nullptr);
  const Tokens prompt = RandomTokens(9, 1);
  EXPECT_THROW(without->Generate(NewCache(), prompt, Drafted(NoStop(3))),
               InvalidArgument);
  EXPECT_EQ(without->Generate(NewCache(), prompt, NoStop(3)).drafted, 0u);
}

// A draft that thinks as the target does saves most of its steps.
TEST_F(DraftModelTest, FewerStepsOfTheTarget) {
  Load();
  const Tokens prompt = RandomTokens(40, 1);
  for (const float temperature : {0.0f, 0.8f}) {
    GenerateOptions options = NoStop(120);
    options.temperature = temperature;
    options.seed = 5;
    const Tokens expected =
        gemma_->Generate(NewCache(), prompt, options).token_ids;
    const size_t before = gemma_->stats().steps;
    const GenerateResult found =
        gemma_->Generate(NewCache(), prompt, Drafted(options));
    EXPECT_EQ(found.token_ids, expected);
    EXPECT_LT(gemma_->stats().steps - before, 60u) << temperature;
    EXPECT_GT(found.accepted, 60u) << temperature;
    EXPECT_LE(found.accepted, found.drafted);
  }
}

// Conversations are read once: one that goes on, is forked or taken back finds
// what the draft knows of it.
TEST_F(DraftModelTest, FollowsForksAndRewinds) {
  Load();
  const std::shared_ptr<Conversation> cache = NewCache();
  const auto rows = [&](const std::shared_ptr<Conversation>& on,
                        const Tokens& prompt) {
    const size_t before = gemma_->stats().draft_rows;
    const std::shared_ptr<Conversation> same = on->Fork();
    const Tokens found =
        gemma_->Generate(on, prompt, Drafted(NoStop(24))).token_ids;
    const size_t took = gemma_->stats().draft_rows - before;
    EXPECT_EQ(found, gemma_->Generate(same, prompt, NoStop(24)).token_ids);
    return took;
  };
  // At most fifteen guesses for each of 24 tokens, and what is new.
  constexpr size_t kMost = 24 * 15 + 24;
  EXPECT_GT(rows(cache, RandomTokens(600, 1)), 600u);
  const Tokens more = RandomTokens(5, 2);
  const std::shared_ptr<Conversation> fork = cache->Fork();
  EXPECT_LT(rows(cache, more), kMost);
  EXPECT_LT(rows(fork, RandomTokens(7, 3)), kMost);
  fork->Truncate(628);  // to where it was forked, a few tokens back
  EXPECT_LT(rows(fork, more), kMost);
  const std::shared_ptr<Conversation> restored =
      Conversation::FromBytes(cache->ToBytes());
  EXPECT_LT(rows(restored, more), kMost);
}

// Nobody learns from a draft's haste what others have said.
TEST_F(DraftModelTest, TenantsFindTheirOwn) {
  Load();
  const auto prefix = std::make_shared<PrefixCache>(size_t{1} << 20);
  const std::array<uint8_t, 1> salts[] = {{1}, {2}};
  const Tokens prompt = RandomTokens(500, 1);
  const auto rows = [&](size_t tenant) {
    const auto mine =
        gemma_->WithPrefix(gemma_->MakePrefixView(prefix, salts[tenant]));
    const size_t before = gemma_->stats().draft_rows;
    mine->Generate(NewCache(), prompt, Drafted(NoStop(20)));
    return gemma_->stats().draft_rows - before;
  };
  EXPECT_GT(rows(0), 480u);
  EXPECT_GT(rows(1), 480u);
  EXPECT_LT(rows(0), 400u);
}

// The same of salts alone, without a prefix cache.
TEST_F(DraftModelTest, SaltsFindTheirOwnWithoutAPrefixCache) {
  Load();
  const std::array<uint8_t, 1> salts[] = {{1}, {2}};
  const Tokens prompt = RandomTokens(500, 1);
  const auto rows = [&](const Engine& mine) {
    const size_t before = gemma_->stats().draft_rows;
    std::shared_ptr<Engine>(mine.WithPrefix(nullptr))
        ->Generate(NewCache(), prompt, Drafted(NoStop(20)));
    return gemma_->stats().draft_rows - before;
  };
  const std::shared_ptr<Engine> first = gemma_->WithSalt(salts[0]);
  const std::shared_ptr<Engine> second = gemma_->WithSalt(salts[1]);
  EXPECT_GT(rows(*first), 480u);
  EXPECT_GT(rows(*second), 480u);
  EXPECT_GT(rows(*gemma_), 480u);  // without a salt
  for (const auto& mine : {first, second, gemma_}) EXPECT_LT(rows(*mine), 400u);
}

// Its weights stay for as long as somebody may ask it.
TEST_F(DraftModelTest, TheTargetKeepsItAlive) {
  Load();
  draft_.reset();
  const Tokens prompt = RandomTokens(40, 1);
  EXPECT_GT(
      gemma_->Generate(NewCache(), prompt, Drafted(NoStop(40))).accepted, 0u);
  // Without it, requests go on, too, and it goes.
  const auto cache = NewCache();
  const auto options = Drafted(NoStop(400));
  const Engine::Job job{cache, prompt, options};
  const auto stream = gemma_->Start({&job, 1})[0];
  gemma_ = gemma_->WithDraft(nullptr);
  stream->WaitDone();
  EXPECT_EQ(stream->Result().token_ids.size(), 400u);
}

// Where there is no room for what the draft knows, nothing is guessed.
TEST_F(DraftModelTest, LittleMemoryMeansFewerGuesses) {
  const Tokens prompt = RandomTokens(200, 1);
  size_t most = 0;
  for (const size_t bytes : {size_t{1}, size_t{100'000}, size_t{300'000},
                             size_t{1'000'000}, size_t{0}}) {
    SchedulerOptions options = Always();
    options.draft_cache_bytes = bytes;
    Load(options);
    const Tokens expected =
        gemma_->Generate(NewCache(), prompt, NoStop(50)).token_ids;
    size_t drafted = 0;
    for (uint32_t i = 0; i < 6; ++i) {
      // Others in between fill it.
      gemma_->Generate(NewCache(), RandomTokens(90, 10 + i),
                       Drafted(NoStop(20)));
      const GenerateResult found =
          gemma_->Generate(NewCache(), prompt, Drafted(NoStop(50)));
      EXPECT_EQ(found.token_ids, expected);
      drafted += found.drafted;
    }
    if (bytes == 1) {
      EXPECT_EQ(drafted, 0u);
    }
    EXPECT_GE(drafted, most);
    most = drafted;
  }
  EXPECT_GT(most, 100u);
}

// A conversation of the machine below, once with guesses and once without.
struct Pair {
  std::shared_ptr<Conversation> plain, guessed;
};

// Conversations that go on, are forked, taken back and restored, several at a
// time, some cancelled in the middle: with any draft every one says what it
// says without, to the bit. GKV_DRAFT_ROUNDS asks for more of it.
class DraftMachineTest : public DraftModelTest,
                         public ::testing::WithParamInterface<std::string> {};

TEST_P(DraftMachineTest, NoBitChanges) {
  const TinyOptions tiny = TinyFamily(GetParam());
  SchedulerOptions scheduler = Always();
  const auto target = LoadTiny(tiny, scheduler);
  TinyOptions other = TinyFamily("gemma3");
  other.seed = 9;
  other.num_layers = 3;
  std::vector<std::shared_ptr<Engine>> drafts = {
      LoadTiny(tiny),  // always right
      LoadTiny(tiny, {}, TensorType::kQ8_0),
      LoadTiny(tiny, {}, TensorType::kQ4_0), LoadTiny(other),
      LoadTiny(TinyFamily("recurrentgemma"))};
  // One that reads the target's keys and values, among them.
  if (tiny.architecture == "gemma4") {
    for (size_t i = 0; i < 3; ++i) {
      drafts.push_back(LoadTiny(TinyFamily("gemma4-assistant")));
    }
  }
  std::vector<std::shared_ptr<Engine>> handles;
  for (const auto& draft : drafts) handles.push_back(target->WithDraft(draft));
  gemma_ = target;
  const char* const asked = std::getenv("GKV_DRAFT_ROUNDS");
  const size_t rounds =
      asked != nullptr ? std::strtoul(asked, nullptr, 10) : kSanitized ? 6 : 20;
  std::mt19937 rng(asked != nullptr ? static_cast<uint32_t>(rounds) : 7);
  std::vector<Pair> pairs;
  size_t requests = 0, drafted = 0, accepted = 0;
  // The number of guesses depends on when a reader cancels: some rounds more
  // where the first ones have not shown enough.
  const auto shown = [&] {
    return accepted > requests / 4 && drafted - accepted > requests / 4;
  };
  for (size_t round = 0;
       round < rounds || (!shown() && round < 5 * rounds); ++round) {
    // What conversations do between calls.
    if (pairs.size() > 24) pairs.erase(pairs.begin(), pairs.begin() + 8);
    for (size_t i = 0; i < 3; ++i) {
      if (pairs.empty() || rng() % 4 == 0) {
        const size_t capacity = rng() % 4 == 0 ? 60 + rng() % 60 : 0;
        pairs.push_back({NewCache(capacity), NewCache(capacity)});
        continue;
      }
      Pair& pair = pairs[rng() % pairs.size()];
      switch (rng() % 4) {
        case 0:
          pairs.push_back({pair.plain->Fork(), pair.guessed->Fork()});
          break;
        case 1: {
          const size_t length = rng() % (pair.plain->length() + 1);
          pair.plain->Truncate(length);
          pair.guessed->Truncate(length);
          break;
        }
        case 2:
          pair.guessed = Conversation::FromBytes(pair.guessed->ToBytes(true),
                                                 {.pool = pool_});
          break;
        default:
          pair.guessed->MakeCheckpoint();
      }
    }
    // Calls of several of them, in steps that they share.
    std::shuffle(pairs.begin(), pairs.end(), rng);
    const size_t count = std::min<size_t>(pairs.size(), 1 + rng() % 8);
    const bool streamed = rng() % 3 == 0;
    std::vector<Tokens> prompts(count);
    std::vector<GenerateOptions> options(count);
    std::vector<size_t> read(count), used(count);
    std::vector<size_t> members;
    for (size_t i = 0; i < count; ++i) {
      const Conversation& cache = *pairs[i].plain;
      if (cache.length() + 90 > cache.capacity_tokens() &&
          cache.capacity_tokens() > 200) {
        pairs[i].plain->Truncate(30);
        pairs[i].guessed->Truncate(30);
      }
      const size_t room = cache.capacity_tokens() - cache.length();
      if (room < 2) continue;
      prompts[i] = RepetitiveTokens(
          std::min<size_t>(1 + rng() % 60, room - 1), rng);
      options[i] = RandomOptions(rng);
      read[i] = rng() % 60;
      used[i] = rng() % drafts.size();
      members.push_back(i);
    }
    std::vector<GenerateResult> results[2];
    for (size_t way = 0; way < 2; ++way) {
      Streams streams;
      for (const size_t i : members) {
        Engine::Job job{way == 0 ? pairs[i].plain : pairs[i].guessed,
                        prompts[i], options[i], streamed};
        if (way == 1) job.options.speculate = Speculate::kDraft;
        const auto& handle = way == 0 ? target : handles[used[i]];
        streams.push_back(handle->Start({&job, 1})[0]);
      }
      for (size_t m = 0; m < members.size(); ++m) {
        for (size_t n = 0; streamed && n < read[members[m]]; ++n) {
          if (!streams[m]->NextEvent()) break;
        }
        if (streamed) streams[m]->Stop(TokenStream::Interrupt::kCancel);
        streams[m]->WaitDone();
        results[way].push_back(streams[m]->Result());
      }
    }
    for (size_t m = 0; m < members.size(); ++m) {
      const GenerateResult& expected = results[0][m];
      const GenerateResult& found = results[1][m];
      const Pair& pair = pairs[members[m]];
      ExpectSameReply(found, expected);
      ASSERT_FALSE(::testing::Test::HasFatalFailure()) << round;
      ASSERT_EQ(pair.guessed->tokens(), pair.plain->tokens());
      ASSERT_LE(found.accepted, found.drafted);
      ++requests;
      drafted += found.drafted;
      accepted += found.accepted;
    }
  }
  RecordProperty("requests", static_cast<int>(requests));
  std::printf("%s: %zu requests, %zu drafted, %zu accepted\n",
              GetParam().c_str(), requests, drafted, accepted);
  EXPECT_GT(accepted, requests / 4);
  EXPECT_GT(drafted - accepted, requests / 4);
}

INSTANTIATE_TEST_SUITE_P(Families, DraftMachineTest,
                         ::testing::ValuesIn(CheckedFamilies()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace gkv
