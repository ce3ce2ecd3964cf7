#include "engine/engine.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "base/sanitized.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

class EngineTest : public ::testing::Test {
 protected:
  static std::shared_ptr<Engine> Load(size_t threads = 2,
                                      bool profile = false) {
    MemorySource source = TinyTensors(TypesAround());
    LoadOptions options;
    options.threads = threads;
    options.profile = profile;
    auto gemma =
        Engine::FromTensors(TinyConfig(TypesAround()), source, options);
    // Token i reads "<i>".
    std::vector<std::string> texts;
    for (int i = 0; i < 97; ++i) texts.push_back("<" + std::to_string(i) + ">");
    gemma->set_token_text(std::make_shared<TokenText>(
        std::vector<std::string_view>(texts.begin(), texts.end())));
    return gemma;
  }

  std::shared_ptr<Conversation> NewCache(size_t capacity = 0) {
    CacheOptions options;
    options.capacity_tokens = capacity;
    options.block_tokens = 16;
    options.pool = pool_;
    return CreateConversation(gemma_->config(), options);
  }

  std::vector<float> Logits(const std::shared_ptr<Conversation>& cache,
                            const Tokens& tokens, bool all = false) {
    const size_t vocab = gemma_->config().vocab_size;
    std::vector<float> logits((all ? tokens.size() : 1) * vocab);
    const auto request = gemma_->StartLogits(cache, tokens, all, logits.data());
    while (!request->WaitDone(std::chrono::seconds(1))) {
    }
    request->Result();
    return logits;
  }

  static GenerateOptions NoStop(size_t max_tokens) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    return options;
  }

  std::shared_ptr<BlockPool> pool_ = [] {
    auto pool = BlockPool::Create();
    pool->set_poison(true);
    return pool;
  }();
  std::shared_ptr<Engine> gemma_ = Load();
};

TEST_F(EngineTest, GreedyFollowsTheArgmaxOfLogits) {
  const Tokens prompt = RandomTokens(40, 1);
  const auto cache = NewCache();
  const GenerateResult result = gemma_->Generate(cache, prompt, NoStop(20));
  ASSERT_EQ(result.token_ids.size(), 20u);
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  EXPECT_EQ(result.prompt_tokens, 40u);
  EXPECT_EQ(cache->length(), 60u);
  const auto other = NewCache();
  Tokens next = prompt;
  for (const int32_t token : result.token_ids) {
    const std::vector<float> logits = Logits(other, next);
    const int32_t best = static_cast<int32_t>(
        std::max_element(logits.begin(), logits.end()) - logits.begin());
    EXPECT_EQ(token, best);
    next = {best};
  }
}

TEST_F(EngineTest, LogitsOfAllPositionsEqualThoseOfEach) {
  const Tokens tokens = RandomTokens(100, 2);
  const std::vector<float> all = Logits(NewCache(), tokens, true);
  const auto cache = NewCache();
  const size_t vocab = gemma_->config().vocab_size;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::vector<float> one = Logits(cache, {tokens[i]});
    ASSERT_EQ(std::memcmp(one.data(), &all[i * vocab], vocab * 4), 0) << i;
  }
}

TEST_F(EngineTest, EmptyPromptContinuesWithTheSameBits) {
  const Tokens prompt = RandomTokens(70, 3);
  const auto whole = NewCache();
  const GenerateResult expected = gemma_->Generate(whole, prompt, NoStop(12));
  const auto cache = NewCache();
  Tokens found = gemma_->Generate(cache, prompt, NoStop(5)).token_ids;
  const Tokens rest = gemma_->Generate(cache, {}, NoStop(7)).token_ids;
  found.insert(found.end(), rest.begin(), rest.end());
  EXPECT_EQ(found, expected.token_ids);
  // Also when nothing is pending.
  const auto prefilled = NewCache();
  Logits(prefilled, prompt);
  EXPECT_EQ(gemma_->Generate(prefilled, {}, NoStop(12)).token_ids,
            expected.token_ids);
}

TEST_F(EngineTest, ThreadsSeeWhatEachSeesAlone) {
  constexpr size_t kCallers = 6;
  GenerateOptions options = NoStop(25);
  options.temperature = 1.2f;
  options.logprobs = true;
  std::vector<GenerateResult> expected, found(kCallers);
  for (size_t i = 0; i < kCallers; ++i) {
    options.seed = i;
    expected.push_back(gemma_->Generate(
        NewCache(), RandomTokens(10 + 30 * i, 50 + static_cast<uint32_t>(i)),
        options));
  }
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kCallers; ++i) {
    threads.emplace_back([&, i] {
      GenerateOptions own = options;
      own.seed = i;
      found[i] = gemma_->Generate(
          NewCache(), RandomTokens(10 + 30 * i, 50 + static_cast<uint32_t>(i)),
          own);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kCallers; ++i) {
    EXPECT_EQ(found[i].token_ids, expected[i].token_ids) << i;
    EXPECT_EQ(found[i].logprobs, expected[i].logprobs) << i;
  }
}

TEST_F(EngineTest, BatchSharesStepsAndKeepsTheOrder) {
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<Tokens> prompts;
  std::vector<Engine::Job> jobs;
  for (uint32_t i = 0; i < 5; ++i) {
    caches.push_back(NewCache());
    prompts.push_back(RandomTokens(5 + i, i));
  }
  for (size_t i = 0; i < 5; ++i) {
    jobs.push_back({caches[i], prompts[i], NoStop(10 + i), false});
  }
  const size_t before = gemma_->stats().steps;
  const auto requests = gemma_->Start(jobs);
  for (const auto& request : requests) {
    while (!request->WaitDone(std::chrono::seconds(1))) {
    }
  }
  // One step of prefill and one for each further token of the longest.
  EXPECT_EQ(gemma_->stats().steps - before, 14u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(
        requests[i]->Result().token_ids,
        gemma_->Generate(NewCache(), prompts[i], NoStop(10 + i)).token_ids);
  }
}

TEST_F(EngineTest, RewindingPastTheWindowIsExact) {
  const Tokens prompt = RandomTokens(300, 4);
  const auto cache = NewCache();
  Logits(cache, prompt);
  for (const size_t keep : {299, 250, 140, 30, 1}) {
    const std::unique_ptr<Conversation> owned = cache->Fork();
    const std::shared_ptr<Conversation> fork(owned->Fork());
    fork->Truncate(keep);
    const Tokens more = RandomTokens(3, static_cast<uint32_t>(keep));
    const std::vector<float> found = Logits(fork, more);
    Tokens whole(prompt.begin(), prompt.begin() + static_cast<long>(keep));
    whole.insert(whole.end(), more.begin(), more.end());
    EXPECT_EQ(found, Logits(NewCache(), whole)) << keep;
  }
}

TEST_F(EngineTest, RewindingWithoutNewTokensIsExact) {
  const Tokens prompt = RandomTokens(300, 5);
  for (const size_t keep : {299, 200, 150, 24, 1}) {
    const auto cache = NewCache();
    Logits(cache, prompt);
    cache->Truncate(keep);
    const Tokens kept(prompt.begin(), prompt.begin() + static_cast<long>(keep));
    EXPECT_EQ(gemma_->Generate(cache, {}, NoStop(6)).token_ids,
              gemma_->Generate(NewCache(), kept, NoStop(6)).token_ids)
        << keep;
  }
}

TEST_F(EngineTest, SnapshotContinuesWithTheSameBits) {
  const auto cache = NewCache();
  gemma_->Generate(cache, RandomTokens(120, 6), NoStop(5));
  const std::vector<uint8_t> bytes = cache->ToBytes();
  const std::shared_ptr<Conversation> restored(Conversation::FromBytes(bytes));
  EXPECT_EQ(restored->tokens(), cache->tokens());
  EXPECT_EQ(gemma_->Generate(restored, {}, NoStop(9)).token_ids,
            gemma_->Generate(cache, {}, NoStop(9)).token_ids);
}

TEST_F(EngineTest, StopStringEndsTextBeforeItAndStaysInTheTranscript) {
  const Tokens prompt = RandomTokens(20, 7);
  const Tokens tokens =
      gemma_->Generate(NewCache(), prompt, NoStop(10)).token_ids;
  GenerateOptions options = NoStop(10);
  // The end of one token's text and the beginning of the next one's.
  options.stop = {std::to_string(tokens[3]) + "><" + std::to_string(tokens[4])};
  size_t at = 0;  // the first place where it stands
  std::string text;
  while (text.find(options.stop[0]) == std::string::npos) {
    text += "<" + std::to_string(tokens[at++]) + ">";
  }
  const auto cache = NewCache();
  std::string streamed;
  const GenerateResult result =
      gemma_->Generate(cache, prompt, options, [&](const TokenEvent& event) {
        streamed += event.text;
        return true;
      });
  EXPECT_EQ(result.finish_reason, FinishReason::kStop);
  EXPECT_EQ(result.token_ids.size(), at);
  EXPECT_EQ(result.text, text.substr(0, text.find(options.stop[0])));
  EXPECT_EQ(streamed, result.text);
  EXPECT_EQ(cache->length(), prompt.size() + at);
}

TEST_F(EngineTest, CancelKeepsExactlyWhatTheReaderSaw) {
  const Tokens prompt = RandomTokens(20, 8);
  const auto cache = NewCache();
  Tokens seen;
  const GenerateResult result = gemma_->Generate(
      cache, prompt, NoStop(200), [&](const TokenEvent& event) {
        if (event.token_id >= 0) seen.push_back(event.token_id);
        return seen.size() < 7;
      });
  EXPECT_EQ(result.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(result.token_ids, seen);
  EXPECT_EQ(seen.size(), 7u);
  EXPECT_EQ(cache->length(), prompt.size() + seen.size());
  // And going on is as if nothing had been.
  const GenerateResult rest = gemma_->Generate(cache, {}, NoStop(5));
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(12)).token_ids;
  seen.insert(seen.end(), rest.token_ids.begin(), rest.token_ids.end());
  EXPECT_EQ(seen, whole);
}

// The last token may be sampled while the reader of the one before it cancels.
TEST_F(EngineTest, CancelJustBeforeTheEndKeepsWhatTheReaderSaw) {
  const Tokens prompt = RandomTokens(5, 8);
  for (int i = 0; i < (kSanitized ? 100 : 500); ++i) {
    const auto cache = NewCache();
    size_t seen = 0;
    const GenerateResult result = gemma_->Generate(
        cache, prompt, NoStop(3), [&](const TokenEvent& event) {
          seen += event.token_id >= 0;
          return seen < 2;
        });
    ASSERT_EQ(seen, 2u);
    ASSERT_EQ(result.token_ids.size(), seen) << "repetition " << i;
    ASSERT_EQ(result.finish_reason, FinishReason::kCancelled);
    ASSERT_EQ(cache->length(), prompt.size() + seen);
  }
}

TEST_F(EngineTest, NobodyWaitsForTheReaderOfAStream) {
  const auto cache = NewCache();
  const Tokens prompt = RandomTokens(20, 8);
  const Engine::Job job{cache, prompt, NoStop(200), true};
  const auto request = gemma_->Start({&job, 1})[0];
  EXPECT_THROW(cache->Truncate(0), Busy);
  EXPECT_THROW(cache->MakeCheckpoint(), Busy);
  EXPECT_THROW(gemma_->Generate(cache, prompt, NoStop(2)), Busy);
  EXPECT_THROW(Logits(cache, prompt), Busy);
  // The stream is none the worse.
  Tokens seen;
  while (const auto event = request->NextEvent(std::chrono::seconds(60))) {
    seen.push_back(event->token_id);
  }
  EXPECT_EQ(seen,
            gemma_->Generate(NewCache(), prompt, NoStop(200)).token_ids);
  cache->Truncate(0);
}

TEST_F(EngineTest, AbortRestoresTheCache) {
  const auto cache = NewCache();
  gemma_->Generate(cache, RandomTokens(50, 9), NoStop(3));
  const Tokens before = cache->tokens();
  const std::vector<uint8_t> bytes = cache->ToBytes();
  const Tokens prompt = RandomTokens(400, 10);
  // It does not end before, however late this thread is.
  std::atomic<bool> stopped = false;
  GenerateOptions options = NoStop(500);
  options.logits_processor = [&](auto...) {
    while (!stopped) std::this_thread::yield();
  };
  const Engine::Job job{cache, prompt, options, false};
  const auto request = gemma_->Start({&job, 1})[0];
  const bool in_time = request->Stop(TokenStream::Interrupt::kAbort);
  stopped = true;
  ASSERT_TRUE(in_time);
  while (!request->WaitDone(std::chrono::seconds(1))) {
  }
  EXPECT_EQ(cache->tokens(), before);
  EXPECT_EQ(cache->ToBytes(), bytes);
  EXPECT_TRUE(cache->TryLock());
}

TEST_F(EngineTest, AnExceptionInTheCallbackRestoresTheCache) {
  const auto cache = NewCache();
  EXPECT_THROW(gemma_->Generate(cache, RandomTokens(9, 1), NoStop(50),
                                [](const TokenEvent&) -> bool {
                                  throw std::runtime_error("mine");
                                }),
               std::runtime_error);
  EXPECT_EQ(cache->length(), 0u);
}

TEST_F(EngineTest, CapacityEndsGenerationOrRefusesThePrompt) {
  const Tokens prompt = RandomTokens(30, 11);
  const auto exact = NewCache(30);
  const GenerateResult none = gemma_->Generate(exact, prompt, NoStop(5));
  EXPECT_EQ(none.finish_reason, FinishReason::kLength);
  EXPECT_TRUE(none.token_ids.empty());
  EXPECT_EQ(exact->length(), 30u);
  const auto two_more = NewCache(32);
  EXPECT_EQ(gemma_->Generate(two_more, prompt, NoStop(5)).token_ids.size(), 2u);
  EXPECT_EQ(two_more->length(), 32u);
  const auto small = NewCache(29);
  EXPECT_THROW(gemma_->Generate(small, prompt, NoStop(5)), CacheFull);
  EXPECT_EQ(small->length(), 0u);
  EXPECT_EQ(small->fingerprint(), Hash128{});
}

TEST_F(EngineTest, PoolFailureRestoresTheCacheAndSparesOthers) {
  const auto cache = NewCache();
  gemma_->Generate(cache, RandomTokens(20, 12), NoStop(3));
  const std::vector<uint8_t> bytes = cache->ToBytes();
  for (size_t n = 1; n <= 4; ++n) {
    pool_->FailAfter(n);
    EXPECT_THROW(gemma_->Generate(cache, RandomTokens(200, 13), NoStop(1)),
                 CacheFull);
    pool_->FailAfter(0);
    EXPECT_EQ(cache->ToBytes(), bytes) << n;
  }
  EXPECT_EQ(gemma_->Generate(cache, {}, NoStop(4)).token_ids.size(), 4u);
}

TEST_F(EngineTest, BadInputIsRefusedBeforeAnyWork) {
  const auto cache = NewCache();
  const Tokens prompt = {1, 2, 3};
  EXPECT_THROW(gemma_->Generate(cache, {}, NoStop(5)), InvalidArgument);
  EXPECT_THROW(gemma_->Generate(cache, Tokens{97}, NoStop(5)), InvalidArgument);
  EXPECT_THROW(gemma_->Generate(cache, Tokens{-1}, NoStop(5)), InvalidArgument);
  GenerateOptions nan = NoStop(5);
  nan.temperature = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(gemma_->Generate(cache, prompt, nan), InvalidArgument);
  const Engine::Job twice[] = {{cache, prompt, NoStop(5), false},
                               {cache, prompt, NoStop(5), false}};
  EXPECT_THROW(gemma_->Start(twice), InvalidArgument);
  // A good row does not hide a bad one, and is not run.
  const auto other = NewCache();
  const Tokens bad = {500};
  const Engine::Job mixed[] = {{other, prompt, NoStop(5), false},
                               {cache, bad, NoStop(5), false}};
  EXPECT_THROW(gemma_->Start(mixed), InvalidArgument);
  EXPECT_EQ(other->length(), 0u);
  EXPECT_EQ(cache->length(), 0u);
  EXPECT_THROW(
      gemma_->Generate(CreateConversation(ModelType::kGemma3_270M), prompt),
      Mismatch);
}

TEST_F(EngineTest, EveryTokenMaskedIsAnError) {
  const auto cache = NewCache();
  GenerateOptions options = NoStop(5);
  for (int32_t id = 0; id < 97; ++id) {
    options.logit_bias.emplace_back(id, -INFINITY);
  }
  EXPECT_THROW(gemma_->Generate(cache, RandomTokens(5, 1), options),
               InvalidArgument);
  EXPECT_EQ(cache->length(), 0u);
}

TEST_F(EngineTest, CachesOfOtherShapesSayWhatDiffers) {
  ModelConfig config = gemma_->config();
  for (LayerConfig& layer : config.layers) {
    if (layer.kind == LayerKind::kSliding) ++layer.window;
  }
  try {
    gemma_->Generate(CreateConversation(config), RandomTokens(5, 1));
    FAIL();
  } catch (const Mismatch& error) {
    EXPECT_NE(std::string(error.what()).find("; layer 0: window is "),
              std::string::npos)
        << error.what();
  }
}

TEST_F(EngineTest, CachesOfOtherWeightsAreRefused) {
  const auto cache = NewCache();
  gemma_->Generate(cache, RandomTokens(5, 1), NoStop(2));
  TinyOptions options = TypesAround();
  options.seed = 2;
  MemorySource source = TinyTensors(options);
  const auto other = Engine::FromTensors(TinyConfig(options), source, {});
  EXPECT_THROW(other->Generate(cache, {}, NoStop(2)), Mismatch);
  EXPECT_EQ(cache->length(), 7u);
}

TEST_F(EngineTest, ForkWhileGeneratingSeesTheLastStep) {
  const auto cache = NewCache();
  const Tokens prompt = RandomTokens(30, 14);
  std::vector<std::shared_ptr<Conversation>> forks;
  gemma_->Generate(cache, prompt, NoStop(20), [&](const TokenEvent&) {
    forks.push_back(std::shared_ptr<Conversation>(cache->Fork()));
    return true;
  });
  const Tokens whole = cache->tokens();
  for (const auto& fork : forks) {
    const Tokens part = fork->tokens();
    ASSERT_LE(part.size(), whole.size());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin()));
    const size_t left = whole.size() - part.size();
    if (left == 0) continue;
    gemma_->Generate(fork, {}, NoStop(left));
    EXPECT_EQ(fork->tokens(), whole);
  }
}

TEST_F(EngineTest, BitsDoNotDependOnWhatTheCallersThreadHasSet) {
  const Tokens tokens = RandomTokens(100, 9);
  const std::span<const int32_t> text(tokens);
  const EmbedOptions mean = {.pooling = Pooling::kMean};
  const std::vector<float> logits = Logits(NewCache(), tokens, true);
  const std::vector<float> vector = gemma_->Embed({&text, 1}, mean, {});
  MemorySource source = TinyTensors(TypesAround());
  const ModelConfig config = TinyConfig(TypesAround());
  const OddFpEnvironment odd;
  gemma_ = Engine::FromTensors(config, source, {});
  EXPECT_EQ(Logits(NewCache(), tokens, true), logits);
  EXPECT_EQ(gemma_->Embed({&text, 1}, mean, {}), vector);
}

TEST_F(EngineTest, MoreThreadsThanProcessorsGiveTheSameBits) {
  const Tokens prompt = RandomTokens(60, 15);
  const Tokens expected =
      gemma_->Generate(NewCache(), prompt, NoStop(20)).token_ids;
  gemma_ = Load(9);
  EXPECT_EQ(gemma_->Generate(NewCache(), prompt, NoStop(20)).token_ids,
            expected);
}

TEST_F(EngineTest, SeveralModelsWorkAtTheSameTime) {
  const auto other = Load(1);
  const Tokens prompt = RandomTokens(60, 16);
  Tokens a, b;
  const auto first = NewCache(), second = NewCache();
  std::thread thread(
      [&] { a = other->Generate(first, prompt, NoStop(30)).token_ids; });
  b = gemma_->Generate(second, prompt, NoStop(30)).token_ids;
  thread.join();
  EXPECT_EQ(a, b);
}

TEST_F(EngineTest, WorksInAForkedProcess) {
  const Tokens prompt = RandomTokens(60, 17);
  const auto cache = NewCache();
  const Tokens expected = gemma_->Generate(cache, prompt, NoStop(10)).token_ids;
  const pid_t child = fork();
  if (child == 0) {
    const bool same =
        gemma_->Generate(NewCache(), prompt, NoStop(10)).token_ids == expected;
    gemma_.reset();
    _exit(same ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  // The parent is as before.
  EXPECT_EQ(gemma_->Generate(NewCache(), prompt, NoStop(10)).token_ids,
            expected);
}

TEST_F(EngineTest, DestroyingTheModelEndsARunningStream) {
  const auto cache = NewCache();
  const Tokens prompt = RandomTokens(10, 18);
  const Engine::Job job{cache, prompt, NoStop(900), true};
  const auto request = gemma_->Start({&job, 1})[0];
  ASSERT_TRUE(request->NextEvent(std::chrono::minutes(1)));
  gemma_.reset();
  EXPECT_TRUE(request->done());
  EXPECT_EQ(request->Result().finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(cache->length(), 11u);
}

TEST_F(EngineTest, BlocksReturnAtQuiescence) {
  {
    const auto cache = NewCache();
    gemma_->Generate(cache, RandomTokens(200, 19), NoStop(10));
    const std::unique_ptr<Conversation> fork = cache->Fork();
    EXPECT_GT(pool_->blocks_in_use(), 0u);
  }
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
  EXPECT_EQ(pool_->bytes_in_use(), 0u);
}

// What min_tokens gives is what banning the stops for so long gives.
TEST_F(EngineTest, MinTokensIsABanOfStopsUntilThen) {
  gemma_ = Load();
  const Tokens prompt = RandomTokens(30, 4);
  for (const float temperature : {0.0f, 1.1f}) {
    GenerateOptions options = NoStop(24);
    options.temperature = temperature;
    options.seed = 11;
    const Tokens free = gemma_->Generate(NewCache(), prompt, options).token_ids;
    const int32_t stop = free[3];

    const auto banned = NewCache();
    GenerateOptions first = options;
    first.max_tokens = 10;
    first.logit_bias = {{stop, -std::numeric_limits<float>::infinity()}};
    Tokens expected = gemma_->Generate(banned, prompt, first).token_ids;
    GenerateOptions rest = options;
    rest.max_tokens = 14;
    rest.stop_token_ids = {stop};
    const GenerateResult second = gemma_->Generate(banned, {}, rest);
    expected.insert(expected.end(), second.token_ids.begin(),
                    second.token_ids.end());

    options.stop_token_ids = {stop};
    EXPECT_LE(gemma_->Generate(NewCache(), prompt, options).token_ids.size(),
              4u);
    options.min_tokens = 10;
    const auto cache = NewCache();
    const GenerateResult found = gemma_->Generate(cache, prompt, options);
    EXPECT_EQ(found.token_ids, expected);
    EXPECT_EQ(found.finish_reason, second.finish_reason);
    EXPECT_EQ(Logits(cache, {5}), Logits(banned, {5}));
  }
}

TEST_F(EngineTest, MinTokensLetsStopStringsPass) {
  gemma_ = Load();
  const Tokens prompt = RandomTokens(30, 4);
  GenerateOptions options = NoStop(12);
  const GenerateResult free = gemma_->Generate(NewCache(), prompt, options);
  const auto text = [](int32_t id) { return "<" + std::to_string(id) + ">"; };
  options.stop = {text(free.token_ids[2]), text(free.token_ids[8])};
  options.min_tokens = 8;
  const GenerateResult found = gemma_->Generate(NewCache(), prompt, options);
  EXPECT_EQ(found.finish_reason, FinishReason::kStop);
  EXPECT_EQ(found.token_ids,
            Tokens(free.token_ids.begin(), free.token_ids.begin() + 9));
  EXPECT_EQ(found.text, free.text.substr(0, found.text.size()));
  options.min_tokens = 100;  // max_tokens ends it even so
  EXPECT_EQ(gemma_->Generate(NewCache(), prompt, options).text, free.text);
}

TEST_F(EngineTest, TopLogprobsOfAStreamAndItsResult) {
  gemma_ = Load();
  const Tokens prompt = RandomTokens(30, 4);
  GenerateOptions options = NoStop(7);
  options.top_logprobs = 3;
  std::vector<TokenLogprob> events;
  const GenerateResult result = gemma_->Generate(
      NewCache(), prompt, options, [&](const TokenEvent& event) {
        EXPECT_EQ(event.top_logprobs.size(), 3u);
        EXPECT_EQ(event.top_logprobs[0].id, event.token_id);  // greedy
        EXPECT_EQ(event.top_logprobs[0].logprob, event.logprob);
        events.insert(events.end(), event.top_logprobs.begin(),
                      event.top_logprobs.end());
        return events.size() < 15;  // cancels after five
      });
  EXPECT_EQ(result.token_ids.size(), 5u);
  EXPECT_EQ(result.logprobs.size(), 5u);
  ASSERT_EQ(result.top_logprobs.size(), 15u);
  for (size_t i = 0; i < 15; ++i) {
    EXPECT_EQ(result.top_logprobs[i].id, events[i].id);
  }
}

TEST_F(EngineTest, TheDeadlineKeepsWhatThereIs) {
  gemma_ = Load();
  const Tokens prompt = RandomTokens(30, 4);
  GenerateOptions options = NoStop(900);
  options.deadline = 0;
  const auto cache = NewCache();
  const GenerateResult none = gemma_->Generate(cache, prompt, options);
  EXPECT_EQ(none.finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(cache->length(), prompt.size());
  options.deadline = 0.01;
  options.logits_processor = [](auto, auto) {
    // 900 of them take longer than the deadline, on any machine.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const GenerateResult some = gemma_->Generate(cache, {}, options);
  EXPECT_EQ(some.finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(cache->length(), prompt.size() + some.token_ids.size());
  options.max_tokens = 2;
  options.deadline = 1e300;
  EXPECT_EQ(gemma_->Generate(cache, {}, options).finish_reason,
            FinishReason::kLength);
}

TEST_F(EngineTest, AProcessorThatThrowsEndsItsRequestAlone) {
  gemma_ = Load();
  const Tokens prompt = RandomTokens(30, 4);
  GenerateOptions bad = NoStop(8);
  bad.logits_processor = [&](std::span<const int32_t> ids, std::span<float>) {
    if (ids.size() == prompt.size() + 3) throw std::domain_error("no more");
  };
  const auto cache = NewCache();
  const auto beside = NewCache();
  const Engine::Job jobs[] = {{cache, prompt, bad},
                              {beside, prompt, NoStop(8)}};
  const auto failing = gemma_->Start({&jobs[0], 1})[0];
  const auto other = gemma_->Start({&jobs[1], 1})[0];
  failing->WaitDone();
  other->WaitDone();
  EXPECT_THROW((void)failing->Result(), std::domain_error);
  EXPECT_EQ(cache->length(), 0u);
  EXPECT_EQ(other->Result().token_ids.size(), 8u);
}

TEST_F(EngineTest, ProfileSumsToTheTimeOfSteps) {
  EXPECT_FALSE(gemma_->profiled());
  EXPECT_THROW((void)gemma_->profile(), InvalidArgument);
  gemma_ = Load(2, true);
  const auto begin = std::chrono::steady_clock::now();
  const auto cache = NewCache();
  const GenerateResult result =
      gemma_->Generate(cache, RandomTokens(200, 3), NoStop(9));
  const StepProfile profile = gemma_->profile();
  const std::chrono::duration<double> all =
      std::chrono::steady_clock::now() - begin;
  const auto& prefill =
      profile.phases[static_cast<size_t>(StepPhase::kPrefill)];
  const auto& decode = profile.phases[static_cast<size_t>(StepPhase::kDecode)];
  EXPECT_EQ(prefill.steps, 2u);  // of 128 rows at most
  EXPECT_EQ(prefill.rows, 200u);
  EXPECT_EQ(decode.steps, 8u);
  EXPECT_EQ(decode.rows, 8u);
  EXPECT_EQ(prefill.loops + decode.loops, gemma_->stats().parallel_loops);
  EXPECT_LE(prefill.seconds + decode.seconds, all.count());
  for (const PhaseProfile* phase : {&prefill, &decode}) {
    double sum = 0;
    for (const double seconds : phase->part_s) sum += seconds;
    EXPECT_NEAR(sum, phase->seconds, 1e-9 * kStepParts);
    for (const StepPart part : {StepPart::kQkv, StepPart::kHead,
                                StepPart::kNorms, StepPart::kAttention}) {
      EXPECT_GT(phase->part_s[static_cast<size_t>(part)], 0);
    }
    EXPECT_EQ(phase->part_s[static_cast<size_t>(StepPart::kExperts)], 0);
  }
  // The same bits with and without.
  const auto plain = Load()->Generate(NewCache(), RandomTokens(200, 3),
                                      NoStop(9));
  EXPECT_EQ(result.token_ids, plain.token_ids);
}

TEST_F(EngineTest, ProfileIsSoundBehindARequestThatFails) {
  gemma_ = Load(2, true);
  GenerateOptions bad = NoStop(8);
  bad.logits_processor = [](std::span<const int32_t> ids, std::span<float>) {
    if (ids.size() == 33) throw std::domain_error("no more");
  };
  EXPECT_THROW((void)gemma_->Generate(NewCache(), RandomTokens(30, 4), bad),
               std::domain_error);
  (void)gemma_->Generate(NewCache(), RandomTokens(30, 5), NoStop(3));
  size_t steps = 0;
  double seconds = 0, parts = 0;
  for (const PhaseProfile& phase : gemma_->profile().phases) {
    steps += phase.steps;
    seconds += phase.seconds;
    for (const double part : phase.part_s) parts += part;
  }
  EXPECT_EQ(steps, gemma_->stats().steps);
  EXPECT_NEAR(parts, seconds, 1e-8 * kStepParts);
}

}  // namespace
}  // namespace gkv
