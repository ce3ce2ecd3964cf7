#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/sanitized.h"
#include "engine/random_requests.h"
#include "engine/scheduler_fixture.h"

namespace gkv {
namespace {

// Forty-eight that decode take all rows of logits there are.
TEST_F(SchedulerTest, APromptBesideManyThatDecodeGetsItsTurn) {
  Load();
  std::vector<Tokens> prompts;
  std::vector<Engine::Job> jobs;
  for (uint32_t i = 0; i < 48; ++i) prompts.push_back(RandomTokens(3, i));
  for (const Tokens& prompt : prompts) {
    jobs.push_back({NewCache(), prompt, NoStop(900)});
  }
  // Makes the steps of all slow: they do not end while this thread is late.
  jobs[0].options = Slow(NoStop(900), std::chrono::milliseconds(20));
  const Streams running = gemma_->Start(jobs);
  while (gemma_->stats().steps < 10) std::this_thread::yield();
  // Steps also run while the machine takes the processor from this thread: the
  // least of some tries counts.
  size_t fewest = SIZE_MAX;
  const Tokens prompt = RandomTokens(100, 99);
  for (int tries = 0; tries < 5; ++tries) {
    const size_t before = gemma_->stats().steps;
    const auto cache = NewCache();
    EXPECT_EQ(gemma_->Generate(cache, prompt, NoStop(1)).token_ids.size(), 1u);
    fewest = std::min(fewest, gemma_->stats().steps - before);
  }
  EXPECT_LE(fewest, 10u);
  for (const auto& stream : running) {
    EXPECT_FALSE(stream->done());
    stream->Stop(TokenStream::Interrupt::kCancel);
  }
  Wait(running);
}

// Those that come later stand behind whoever runs: one that needs many rows of
// logits gets them, however many short requests follow.
TEST_F(SchedulerTest, LaterOnesDoNotPassWhoeverWaits) {
  SchedulerOptions options;
  options.logits_rows = 2;
  options.max_guesses = 0;
  options.max_running = 4;
  Load(options);
  const Tokens prompt = RandomTokens(40, 1);
  const Tokens one = RandomTokens(1, 2);
  std::vector<float> logits(prompt.size() * kVocab);
  const auto cache = NewCache();
  const auto rows = gemma_->StartLogits(cache, prompt, true, logits.data());
  std::atomic<size_t> passed{0};
  GenerateOptions short_one = NoStop(1);
  short_one.logits_processor = [&](auto...) { passed += !rows->done(); };
  std::vector<Engine::Job> jobs;
  for (int i = 0; i < 300; ++i) jobs.push_back({NewCache(), one, short_one});
  Streams later;
  for (const Engine::Job& job : jobs) {
    later.push_back(gemma_->Start({&job, 1})[0]);
  }
  Wait(later);
  EXPECT_LT(passed, 4 * prompt.size());
}

// Limits may be as large as a size can be.
TEST_F(SchedulerTest, HugeLimitsAreNone) {
  constexpr size_t kHuge = std::numeric_limits<size_t>::max();
  const Tokens prompt = RandomTokens(30, 1);
  for (size_t SchedulerOptions::* limit :
       {&SchedulerOptions::step_rows,
        &SchedulerOptions::prefill_rows_while_decoding,
        &SchedulerOptions::logits_rows, &SchedulerOptions::max_running,
        &SchedulerOptions::max_queued}) {
    SchedulerOptions options;
    options.*limit = kHuge;
    if (limit == &SchedulerOptions::max_running) options.max_queued = 1;
    options.Validate();
    Load(options);
    std::vector<Engine::Job> jobs;
    for (int i = 0; i < (kSanitized ? 70 : 300); ++i) {
      jobs.push_back({NewCache(), {prompt.data(), 5}, NoStop(2)});
    }
    const Streams streams = gemma_->Start(jobs);
    Wait(streams);
    EXPECT_EQ(streams[0]->Result().token_ids.size(), 2u);
  }
}

TEST_F(SchedulerTest, TheQueueIsBounded) {
  SchedulerOptions options;
  options.max_running = 2;
  options.max_queued = 1;
  Load(options);
  const Tokens prompt = RandomTokens(5, 1);
  std::vector<std::shared_ptr<Conversation>> caches;
  Streams running;
  for (int i = 0; i < 3; ++i) {
    caches.push_back(NewCache());
    const Engine::Job job{caches.back(), prompt, Slow(NoStop(900))};
    running.push_back(gemma_->Start({&job, 1})[0]);
  }
  const auto refused = NewCache();
  EXPECT_THROW(gemma_->Generate(refused, prompt, NoStop(1)), QueueFull);
  EXPECT_EQ(refused->length(), 0u);
  EXPECT_TRUE(refused->TryLock());
  // The third waits until one of the others has ended.
  EXPECT_EQ(running[2]->Result().token_ids.size(), 0u);
  running[0]->Stop(TokenStream::Interrupt::kCancel);
  while (caches[2]->length() < 8) std::this_thread::yield();
  EXPECT_FALSE(running[1]->done());
  EXPECT_NO_THROW(
      gemma_->Start(std::vector<Engine::Job>{{refused, prompt, NoStop(1)}}));
  running[1]->Stop(TokenStream::Interrupt::kCancel);
  running[2]->Stop(TokenStream::Interrupt::kCancel);
  Wait(running);
}

// One that waits for its reader takes nobody's place.
class ManyRequestsTest : public SchedulerTest {
 protected:
  static bool Has(const char* what) {
    return GetParam().find(what) != std::string::npos;
  }
};

// How often the scheduler looks at a sequence, for each of `count` requests.
TEST_P(ManyRequestsTest, TheWorkForOneDoesNotGrowWithTheOthers) {
  const auto looks_of = [&](size_t count) {
    Load({.max_running = Has("pairs") ? size_t{2} : size_t{8}});
    if (Has("prefix")) {
      gemma_ = gemma_->WithPrefix(gemma_->MakePrefixView(
          std::make_shared<PrefixCache>(size_t{1} << 20), {}));
    }
    std::vector<std::shared_ptr<Conversation>> caches;
    std::vector<Tokens> prompts;
    std::vector<Engine::Job> jobs;
    for (size_t i = 0; i < count; ++i) {
      caches.push_back(NewCache());
      prompts.push_back({2, static_cast<int32_t>(2 + i % 90)});
    }
    std::promise<void> all_came;
    for (size_t i = 0; i < count; ++i) {
      GenerateOptions options = NoStop(2);
      if (i == 0) {  // the others wait while it runs
        options.logits_processor =
            [came = all_came.get_future().share()](auto...) { came.wait(); };
      }
      if (Has("deadlines")) options.deadline = 3600.0 + i;
      if (Has("fail") && i % 2 == 1) {
        options.logits_processor = [](auto...) {
          throw std::domain_error("no");
        };
      }
      jobs.push_back({caches[i], prompts[i], options});
    }
    Streams streams;
    const size_t each = Has("batch") ? count : Has("pairs") ? 2 : 1;
    for (size_t i = 0; i < count; i += each) {
      const Streams some = gemma_->Start(std::span(jobs).subspan(i, each));
      streams.insert(streams.end(), some.begin(), some.end());
    }
    all_came.set_value();
    Wait(streams);
    for (const auto& stream : streams) {
      if (Has("fail")) {
        EXPECT_THROW((void)stream->Result(), std::domain_error);
      } else {
        EXPECT_EQ(stream->Result().token_ids.size(), 2u);
      }
    }
    return static_cast<double>(gemma_->stats().looks) /
           static_cast<double>(count);
  };
  // A few for each step, and for each one that runs beside it.
  EXPECT_LT(looks_of(50), 100);
  if (kSanitized) return;  // time, not memory
  EXPECT_LT(looks_of(1000), 100);
}

INSTANTIATE_TEST_SUITE_P(
    SchedulerTest, ManyRequestsTest,
    ::testing::Values("batch", "batch_prefix", "batch_deadlines", "pairs",
                      "pairs_fail", "alone", "alone_prefix_deadlines"),
    [](const auto& info) { return info.param; });

// Whoever waits and is stopped, or runs out of time, is gone at once, though
// nobody looks at it otherwise.
TEST_F(SchedulerTest, WhoWaitsIsStoppedBeforeItsTurn) {
  Load({.max_running = 1});
  const auto start = [&](double deadline) {
    GenerateOptions options = NoStop(5);
    options.deadline = deadline;
    const Engine::Job job{NewCache(), prompt_, options};
    return gemma_->Start({&job, 1})[0];
  };
  const auto cache = NewCache();
  const Engine::Job first{cache, prompt_, Slow(NoStop(5000))};
  const auto running = gemma_->Start({&first, 1})[0];
  const auto late = start(0.01), cancelled = start(1000), aborted = start(1000);
  cancelled->Stop(TokenStream::Interrupt::kCancel);
  aborted->Stop(TokenStream::Interrupt::kAbort);
  for (const auto& stream : {late, cancelled, aborted}) stream->WaitDone();
  EXPECT_FALSE(running->done());
  EXPECT_EQ(late->Result().finish_reason, FinishReason::kDeadline);
  EXPECT_EQ(cancelled->Result().finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(aborted->Result().finish_reason, FinishReason::kCancelled);
  running->Stop(TokenStream::Interrupt::kAbort);
  running->WaitDone();
}

// Members of a batch that run, wait and are done end together.
TEST_F(SchedulerTest, ABatchEndsWhereverItsMembersAre) {
  for (const bool fails : {false, true}) {
    Load({.max_running = 1});
    std::vector<std::shared_ptr<Conversation>> caches;
    std::vector<Engine::Job> jobs;
    for (size_t i = 0; i < 4; ++i) {
      caches.push_back(NewCache());
      GenerateOptions options = NoStop(3);
      if (fails && i == 2) {
        options.logits_processor = [](auto...) {
          throw std::domain_error("no");
        };
      }
      jobs.push_back({caches[i], prompt_, options});
    }
    const Streams streams = gemma_->Start(jobs);
    Wait(streams);
    for (size_t i = 0; i < 4; ++i) {
      if (fails) {
        EXPECT_THROW((void)streams[i]->Result(), std::domain_error);
      }
      EXPECT_EQ(caches[i]->length(), fails ? 0u : 6u);
    }
    const auto after = NewCache();
    EXPECT_EQ(gemma_->Generate(after, prompt_, NoStop(2)).token_ids.size(), 2u);
  }
}

TEST_F(SchedulerTest, HalfReadStreamsTakeNoPlace) {
  SchedulerOptions options;
  options.max_running = 1;
  Load(options);
  const Tokens prompt = RandomTokens(5, 1);
  const auto cache = NewCache();
  const Engine::Job job{cache, prompt, NoStop(50), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  EXPECT_EQ(gemma_->Generate(NewCache(), prompt, NoStop(20)).token_ids.size(),
            20u);
  size_t count = 0;
  while (stream->NextEvent()) ++count;
  EXPECT_EQ(count, 50u);
}

TEST_F(SchedulerTest, DeadlinesEndWhatRunsAndWhatWaits) {
  SchedulerOptions options;
  options.max_running = 1;
  Load(options);
  const Tokens prompt = RandomTokens(30, 1);
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(900)).token_ids;
  const auto soon = Clock::now() + std::chrono::milliseconds(30);
  const auto running = NewCache(), waiting = NewCache();
  const Engine::Job jobs[] = {
      {.cache = running, .prompt = prompt, .options = Slow(NoStop(900))},
      {.cache = waiting, .prompt = prompt, .options = NoStop(5)}};
  Engine::Job first = jobs[0], second = jobs[1];
  first.deadline = Clock::now() + std::chrono::milliseconds(60);
  second.deadline = soon;
  const auto a = gemma_->Start({&first, 1})[0];
  const auto b = gemma_->Start({&second, 1})[0];
  b->WaitDone();
  EXPECT_EQ(b->Result().finish_reason, FinishReason::kDeadline);
  EXPECT_TRUE(b->Result().token_ids.empty());
  EXPECT_EQ(waiting->tokens(), prompt);
  a->WaitDone();
  if (a->Result().finish_reason == FinishReason::kDeadline) {
    const Tokens& found = a->Result().token_ids;
    EXPECT_TRUE(std::equal(found.begin(), found.end(), whole.begin()));
    EXPECT_EQ(running->length(), prompt.size() + found.size());
  }
  // A stream that nobody reads, too: what it made can still be read.
  Engine::Job third{waiting, {}, NoStop(900), true};
  Tokens read;
  FinishReason last = FinishReason::kNone;
  // As much time as it takes for two.
  for (auto time = std::chrono::milliseconds(20); read.size() < 2; time *= 3) {
    ASSERT_LT(time, std::chrono::minutes(2));
    waiting->Truncate(prompt.size());
    read.clear();
    third.deadline = Clock::now() + time;
    const auto c = gemma_->Start({&third, 1})[0];
    c->WaitDone();
    while (const auto event = c->NextEvent()) {
      if (event->token_id >= 0) read.push_back(event->token_id);
      last = event->finish_reason;
    }
  }
  EXPECT_EQ(last, FinishReason::kDeadline);
  EXPECT_EQ(read, Tokens(whole.begin(), whole.begin() + 2));
  EXPECT_EQ(waiting->length(), prompt.size() + 2);
}

// ---- Batches ----

TEST_F(SchedulerTest, ABatchSucceedsOrFailsAsOne) {
  Load();
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<Tokens> before;
  std::vector<Engine::Job> jobs;
  const Tokens prompt = RandomTokens(20, 3);
  for (uint32_t i = 0; i < 4; ++i) {
    caches.push_back(NewCache());
    gemma_->Generate(caches[i], RandomTokens(10 + i, i), NoStop(2));
    before.push_back(caches[i]->tokens());
    jobs.push_back({caches[i], prompt, NoStop(1 + 30 * i)});
  }
  // The last one fails when the first has been done for long, and was looked
  // at.
  std::atomic<int> calls{0};
  std::atomic<bool> seen{false};
  struct FailsLater : Constraint {
    FailsLater(std::atomic<int>& n, std::atomic<bool>& s) : calls(n), seen(s) {}
    bool ComputeMask(std::span<uint32_t> mask) override {
      while (calls == 30 && !seen) std::this_thread::yield();
      if (++calls == 50) throw InvalidArgument("mine");
      std::fill(mask.begin(), mask.end(), ~uint32_t{0});
      return false;
    }
    void Accept(int32_t) override {}
    void Rollback(size_t) override {}
    std::unique_ptr<Constraint> Clone() const override {
      return std::make_unique<FailsLater>(calls, seen);
    }
    std::atomic<int>& calls;
    std::atomic<bool>& seen;
  };
  jobs[3].constraint = std::make_shared<FailsLater>(calls, seen);
  const Streams streams = gemma_->Start(jobs);
  while (calls < 20) std::this_thread::yield();
  EXPECT_FALSE(streams[0]->done()) << "decided before the others";
  EXPECT_FALSE(caches[0]->TryLock());
  seen = true;
  Wait(streams);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_THROW(streams[i]->Result(), InvalidArgument);
    EXPECT_EQ(caches[i]->tokens(), before[i]);
    EXPECT_TRUE(caches[i]->TryLock());
  }
  // Aborting one aborts all.
  jobs.pop_back();
  std::atomic<bool> aborted{false};
  jobs[2].options.logits_processor = [&](auto...) {
    while (!aborted) std::this_thread::yield();
  };
  const Streams again = gemma_->Start(jobs);
  again[2]->Stop(TokenStream::Interrupt::kAbort);
  aborted = true;
  Wait(again);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(caches[i]->tokens(), before[i]);
}

// An abort that comes when all is done: whoever used the conversation
// meanwhile keeps it.
TEST_F(SchedulerTest, ALateAbortTakesNothingFromOthers) {
  Load();
  const Tokens prompt = RandomTokens(20, 3);
  for (const bool used : {false, true}) {
    const auto cache = NewCache();
    const Engine::Job job{cache, prompt, NoStop(5)};
    const auto stream = gemma_->Start({&job, 1})[0];
    stream->WaitDone();
    if (used) {
      cache->Truncate(22);
      gemma_->Generate(cache, {}, NoStop(3));  // as long as before
    }
    stream->Abort();
    EXPECT_EQ(cache->length(), used ? 25u : 0u);
  }
}

// ---- Streams that fail or are cancelled ----

TEST_F(SchedulerTest, AFailingStreamKeepsWhatItDelivered) {
  Load();
  const Tokens prompt = RandomTokens(30, 5);
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(60)).token_ids;
  for (const size_t delivered : {0, 1, 4, 20}) {
    const auto pool = BlockPool::Create();
    const auto cache = NewCache(0, pool);
    GenerateOptions options = NoStop(60);
    // A step that has no room for its guesses runs without them.
    options.speculate = Speculate::kOff;
    const Engine::Job job{cache, prompt, options, true};
    const auto stream = gemma_->Start({&job, 1})[0];
    Tokens read;
    while (read.size() < delivered) {
      read.push_back(stream->NextEvent()->token_id);
    }
    while (!stream->waits_for_reader()) std::this_thread::yield();
    pool->FailAfter(1);
    while (const auto event = stream->NextEvent()) {
      read.push_back(event->token_id);
    }
    EXPECT_TRUE(stream->Drained());
    try {
      stream->Result();
      FAIL();
    } catch (const CacheFull& error) {
      const std::string keeps = "; the conversation keeps the " +
                                std::to_string(read.size()) +
                                " tokens that were delivered";
      EXPECT_EQ(std::string(error.what()).ends_with(keeps), !read.empty())
          << error.what();
    }
    Tokens expected = prompt;
    expected.insert(expected.end(), read.begin(), read.end());
    EXPECT_EQ(cache->tokens(), read.empty() ? Tokens() : expected);
    if (read.empty()) continue;
    const Tokens rest =
        gemma_->Generate(cache, {}, NoStop(60 - read.size())).token_ids;
    read.insert(read.end(), rest.begin(), rest.end());
    EXPECT_EQ(read, whole);
  }
}

TEST_F(SchedulerTest, ReadersAreToldWithoutPolling) {
  Load();
  const auto cache = NewCache();
  const Tokens prompt = RandomTokens(30, 5);
  const Engine::Job job{cache, prompt, NoStop(20), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  std::mutex mutex;
  std::condition_variable changed;
  bool news = true;  // what came before the callback was set
  stream->set_on_change([&] {
    const std::lock_guard lock(mutex);
    news = true;
    changed.notify_one();
  });
  size_t count = 0;
  while (!stream->Drained()) {
    {
      std::unique_lock lock(mutex);
      ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(60),
                                   [&] { return news; }));
      news = false;
    }
    while (stream->NextEvent(std::chrono::milliseconds(0))) ++count;
  }
  EXPECT_EQ(count, 20u);
  stream->set_on_change({});
}

// ---- Preemption ----

class PreemptionTest : public SchedulerTest {};

TEST_P(PreemptionTest, ASmallPoolGivesTheBitsOfALargeOne) {
  Load({}, GetParam());
  constexpr uint32_t kConversations = 10;
  const auto prompt = [](uint32_t i) { return RandomTokens(40 + 7 * i, i); };
  std::vector<GenerateResult> expected;
  std::vector<std::vector<float>> logits;
  size_t largest = 0;
  std::atomic<uint32_t> started{0};
  // Conversations that end with their requests.
  const auto run = [&](uint32_t i, const std::shared_ptr<BlockPool>& pool) {
    const Tokens tokens = prompt(i);
    Engine::Job job{NewCache(0, pool), tokens, Sampled(60, i)};
    const auto stream = gemma_->Start({&job, 1})[0];
    ++started;
    job.cache.reset();
    stream->WaitDone();
    return stream->Result();
  };
  const auto all = [&](uint32_t i, const std::shared_ptr<BlockPool>& pool) {
    auto cache = NewCache(0, pool);
    const Tokens tokens = prompt(i);
    std::vector<float> rows(tokens.size() * kVocab);
    const auto stream = gemma_->StartLogits(cache, tokens, true, rows.data());
    ++started;
    cache.reset();
    stream->WaitDone();
    stream->Result();
    return rows;
  };
  for (uint32_t i = 0; i < kConversations; ++i) {
    const auto cache = NewCache();
    expected.push_back(gemma_->Generate(cache, prompt(i), Sampled(60, i)));
    largest = std::max(largest, cache->nbytes());
    logits.push_back(all(i, pool_));
  }
  const auto small = BlockPool::Create(std::max(5 * largest / 2, BytesOf(170)));
  small->set_poison(true);
  // The first step after this one has all of them.
  started = 0;
  GenerateOptions held = NoStop(1);
  held.logits_processor = [&](auto...) {
    while (started < kConversations) std::this_thread::yield();
  };
  const Engine::Job holding{NewCache(), prompt_, held};
  const auto holder = gemma_->Start({&holding, 1})[0];
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kConversations; ++i) {
    threads.emplace_back([&, i] {
      if (i % 5 == 4) {
        EXPECT_EQ(all(i, small), logits[i]) << i;
        return;
      }
      const GenerateResult found = run(i, small);
      EXPECT_EQ(found.token_ids, expected[i].token_ids) << i;
      EXPECT_EQ(found.logprobs, expected[i].logprobs) << i;
      EXPECT_EQ(found.text, expected[i].text) << i;
    });
  }
  for (std::thread& thread : threads) thread.join();
  holder->WaitDone();
  EXPECT_GT(gemma_->stats().preemptions, 0u);
  EXPECT_EQ(small->bytes_in_use(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Families, PreemptionTest,
                         ::testing::ValuesIn(CheckedFamilies()),
                         [](const auto& info) { return info.param; });

TEST_F(SchedulerTest, WhatIsTooLargeForThePoolAloneFails) {
  Load();
  const Tokens prompt = RandomTokens(300, 1);
  const auto pool = BlockPool::Create(BytesOf(100));
  const auto large = NewCache(0, pool);
  const auto beside = NewCache(0, pool);
  const Tokens shorter = RandomTokens(20, 2);
  const Engine::Job job{beside, shorter, NoStop(50)};
  const auto other = gemma_->Start({&job, 1})[0];
  EXPECT_THROW(gemma_->Generate(large, prompt, NoStop(1)), CacheFull);
  EXPECT_EQ(large->length(), 0u);
  EXPECT_EQ(large->nbytes(), 0u);
  other->WaitDone();
  EXPECT_EQ(other->Result().token_ids,
            gemma_->Generate(NewCache(), shorter, NoStop(50)).token_ids);
}

// What a request would go back to shares the block that it goes on in.
TEST_F(SchedulerTest, WhatJustFitsThePoolGoesOn) {
  Load();
  const Tokens prompt = RandomTokens(5, 1);
  const Tokens more = RandomTokens(3, 2);
  const auto expected = NewCache();
  size_t bytes = 0;
  for (const KvGroup& group : expected->layout().groups()) {
    bytes += group.block_bytes;
  }
  const auto cache = NewCache(0, BlockPool::Create(bytes));
  for (const auto& c : {expected, cache}) {
    gemma_->Generate(c, prompt, NoStop(2));
  }
  // Does not fit, and leaves nothing behind.
  EXPECT_THROW(gemma_->Generate(cache, more, NoStop(20)), CacheFull);
  EXPECT_EQ(cache->tokens(), expected->tokens());
  const GenerateResult result = gemma_->Generate(cache, more, NoStop(3));
  const GenerateResult wanted = gemma_->Generate(expected, more, NoStop(3));
  EXPECT_EQ(result.token_ids, wanted.token_ids);
  EXPECT_EQ(result.cached_tokens, wanted.cached_tokens);
  for (size_t layer = 0; layer < cache->layout().layers().size(); ++layer) {
    EXPECT_EQ(cache->CopyLayer(layer, false),
              expected->CopyLayer(layer, false));
    EXPECT_EQ(cache->CopyLayer(layer, true), expected->CopyLayer(layer, true));
  }
}

// Streams give way too, keep what was delivered, and may be cancelled
// meanwhile. One whose reader is away gives way to everybody.
TEST_F(SchedulerTest, StreamsGiveWay) {
  Load();
  const Tokens prompt = RandomTokens(100, 1);
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(40)).token_ids;
  const auto pool = BlockPool::Create(BytesOf(prompt.size() + 40));
  for (const bool cancel : {false, true}) {
    const auto cache = NewCache(0, pool);
    const Engine::Job job{cache, prompt, NoStop(40), true};
    const auto stream = gemma_->Start({&job, 1})[0];
    Tokens read = {stream->NextEvent()->token_id};
    while (!stream->waits_for_reader()) std::this_thread::yield();
    const size_t before = gemma_->stats().preemptions;
    const auto other = NewCache(0, pool);
    EXPECT_EQ(gemma_->Generate(other, prompt, NoStop(40)).token_ids, whole);
    EXPECT_GT(gemma_->stats().preemptions, before);
    other->Reset();
    if (cancel) {
      stream->Stop(TokenStream::Interrupt::kCancel);
      stream->WaitDone();
      EXPECT_EQ(cache->length(), prompt.size() + 1);
    } else {
      while (const auto event = stream->NextEvent()) {
        read.push_back(event->token_id);
      }
      EXPECT_EQ(read, whole);
    }
  }
}

TEST_F(SchedulerTest, ABatchThatDoesNotFitIsUndone) {
  Load();
  const Tokens prompt = RandomTokens(100, 1);
  const auto probe = NewCache();
  gemma_->Generate(probe, prompt, NoStop(10));
  const auto pool = BlockPool::Create(
      std::max(probe->nbytes() * 5 / 2, BytesOf(prompt.size() + 10)));
  std::vector<std::shared_ptr<Conversation>> caches;
  std::vector<Engine::Job> jobs;
  for (int i = 0; i < 4; ++i) {
    caches.push_back(NewCache(0, pool));
    jobs.push_back({caches.back(), prompt, NoStop(10)});
  }
  const Streams streams = gemma_->Start(jobs);
  Wait(streams);
  for (int i = 0; i < 4; ++i) {
    EXPECT_THROW(streams[i]->Result(), CacheFull);
    EXPECT_EQ(caches[i]->length(), 0u);
  }
  EXPECT_EQ(pool->bytes_in_use(), 0u);
}

// Whoever is done and waits for the rest of a younger batch gives way too.
TEST_F(SchedulerTest, AYoungerBatchGivesBackWhatIsDone) {
  Load();
  const Tokens prompt = RandomTokens(100, 1);
  const Tokens shorter = RandomTokens(20, 2);
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(150)).token_ids;
  // The least that one needs alone.
  const auto pool = LeastPool(BytesOf(0), [&](const auto& some) {
    gemma_->Generate(NewCache(0, some), prompt, NoStop(150));
  });
  const auto old = NewCache(0, pool);
  const Engine::Job job{old, prompt, NoStop(150), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  while (!stream->waits_for_reader()) std::this_thread::yield();
  const std::shared_ptr<Conversation> caches[] = {NewCache(0, pool),
                                                  NewCache(0, pool)};
  // It goes on when the old one's reader has come back. It never ends by itself
  // and keeps blocks then, however often that reader is late: there is no room
  // for all of it.
  std::atomic<bool> waits{false}, goes_on{false};
  GenerateOptions held = NoStop(900);
  held.logits_processor = [&](std::span<const int32_t> ids, auto) {
    waits = ids.size() >= 25;
    while (waits && !goes_on) std::this_thread::yield();
  };
  const Engine::Job batch[] = {{caches[0], prompt, NoStop(1)},
                               {caches[1], shorter, held}};
  const Streams younger = gemma_->Start(batch);
  while (!waits) std::this_thread::yield();
  Tokens read = {stream->NextEvent()->token_id};
  goes_on = true;
  while (const auto event = stream->NextEvent()) {
    read.push_back(event->token_id);
  }
  EXPECT_EQ(read, whole);
  Wait(younger);
  EXPECT_THROW(younger[1]->Result(), CacheFull);
}

// Whoever gave way needs no more room to come back than it took to get there.
TEST_F(SchedulerTest, ComesBackWhereItJustFits) {
  Load();
  const Tokens prompt = RandomTokens(20, 1);
  const Tokens whole =
      gemma_->Generate(NewCache(), prompt, NoStop(230)).token_ids;
  // The least that one needs alone.
  const auto pool = LeastPool(BytesOf(0), [&](const auto& some) {
    gemma_->Generate(NewCache(0, some), prompt, NoStop(230));
  });
  const auto cache = NewCache(0, pool);
  const Engine::Job job{cache, prompt, NoStop(230), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  Tokens read;
  while (read.size() < 200) read.push_back(stream->NextEvent()->token_id);
  const auto other = NewCache(0, pool);
  EXPECT_EQ(gemma_->Generate(other, prompt, NoStop(230)).token_ids, whole);
  other->Reset();
  EXPECT_GT(gemma_->stats().preemptions, 0u);
  while (const auto event = stream->NextEvent()) {
    read.push_back(event->token_id);
  }
  EXPECT_EQ(read, whole);
}

// Pools are apart: who fills one takes nothing from those of another.
TEST_F(SchedulerTest, OtherPoolsAreLeftAlone) {
  Load();
  const auto probe = NewCache();
  const Tokens prompt = RandomTokens(100, 1);
  gemma_->Generate(probe, prompt, NoStop(10));
  const auto elsewhere = NewCache();
  const Engine::Job job{elsewhere, prompt, NoStop(900)};
  const auto stream = gemma_->Start({&job, 1})[0];
  while (gemma_->stats().steps < 20) std::this_thread::yield();
  const auto small = BlockPool::Create(probe->nbytes() / 2);
  const auto cache = NewCache(0, small);
  EXPECT_THROW(gemma_->Generate(cache, prompt, NoStop(1)), CacheFull);
  EXPECT_EQ(gemma_->stats().preemptions, 0u);
  stream->Abort();
}

// ---- Rows that are no logits ----

TEST_F(SchedulerTest, HiddenStatesAreTheSameInAnyStep) {
  Load();
  const size_t width = gemma_->config().hidden_size;
  const Tokens tokens = RandomTokens(150, 7);
  std::vector<float> all(tokens.size() * width), last(width);
  const auto rows = [&](const std::shared_ptr<Conversation>& cache,
                        std::span<const int32_t> ids, bool all_positions,
                        float* out) {
    const auto stream =
        gemma_->StartRows(cache, ids, RowOutput::kHidden, all_positions, out);
    stream->WaitDone();
    stream->Result();
  };
  rows(NewCache(), tokens, true, all.data());
  const auto cache = NewCache();
  for (size_t i = 0; i < tokens.size(); i += 50) {
    rows(cache, std::span(tokens).subspan(i, 50), false, last.data());
    EXPECT_TRUE(
        std::equal(last.begin(), last.end(),
                   all.begin() + static_cast<ptrdiff_t>((i + 49) * width)));
  }
}

}  // namespace
}  // namespace gkv
