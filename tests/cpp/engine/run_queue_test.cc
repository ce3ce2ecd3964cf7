// The lists of requests, without a model and without a thread: rows are made
// up, and the test says what each round does.

#include "engine/run_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <list>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "store/filled_prefix.h"
#include "store/memory_store.h"

namespace gkv {
namespace {

using Clock = std::chrono::steady_clock;
using Ids = std::vector<int32_t>;

constexpr size_t kVocab = 40;

// Says the same token again and again, so many times.
class Says : public RowConsumer {
 public:
  explicit Says(size_t count) : left_(count) {}
  RowOutput output() const override { return {}; }
  TokenEvent Take(const OutputRow&) override {
    TokenEvent event{7};
    if (--left_ == 0) event.finish_reason = FinishReason::kLength;
    return event;
  }

 private:
  size_t left_;
};

class RunQueueTest : public ::testing::Test {
 protected:
  struct Asked {
    size_t tokens = 5;  // to say
    bool streamed = false;
    std::optional<Clock::time_point> deadline = std::nullopt;
    std::shared_ptr<Batch> batch = nullptr;
    std::shared_ptr<BlockPool> pool = nullptr;
    PrefixAccess prefix = {};
    size_t prompt = 20;
  };

  void Limit(size_t max_running, size_t max_queued = 1000) {
    SchedulerOptions options;
    options.max_running = max_running;
    options.max_queued = max_queued;
    queue_ = std::make_unique<RunQueue>(options);
  }
  // A request and its stream; it comes when it is submitted.
  std::shared_ptr<TokenStream> Make(std::list<Request>& requests,
                                    Asked asked) {
    const std::shared_ptr<Conversation> cache = EmptyConversation(
        FullLayers(), KvDtype::kBF16, 16, asked.pool ? asked.pool : pool_);
    Ids prompt(asked.prompt);
    std::iota(prompt.begin(), prompt.end(), 1);
    auto stream = std::make_shared<TokenStream>(
        cache, cache->Lock(), prompt,
        TokenStream::Options{.streamed = asked.streamed});
    requests.emplace_back(
        Request::Parts{.stream = stream,
                        .consumer = std::make_unique<Says>(asked.tokens),
                        .deadline = asked.deadline,
                        .batch = asked.batch,
                        .prefix = asked.prefix});
    return stream;
  }
  std::shared_ptr<TokenStream> Submit() { return Submit(Asked{}); }
  std::shared_ptr<TokenStream> Submit(Asked asked) {
    std::list<Request> requests;
    auto stream = Make(requests, std::move(asked));
    queue_->Submit(std::move(requests));
    return stream;
  }

  // What the scheduler does before a step: who takes rows then, by streams.
  std::vector<TokenStream*> Round() {
    EXPECT_TRUE(queue_->WaitForWork());
    queue_->Interrupt();
    queue_->Retire();
    queue_->Admit();
    return Runnable();
  }
  std::vector<TokenStream*> Runnable() {
    std::vector<TokenStream*> streams;
    for (const Request* request : queue_->Runnable()) {
      streams.push_back(&request->stream());
    }
    return streams;
  }
  // A step in which each of the round takes as much as `rows`.
  void Step(size_t rows = 100) {
    for (Request* request : queue_->Runnable()) Take(*request, rows);
    queue_->Retire();
  }
  void Take(Request& request, size_t rows = 100) {
    const PlanInput input = request.ToPlan();
    const size_t end = std::min(input.target, input.next + rows);
    StepSlice slice = request.Prepare({0, input.next, end}, kVocab, 8);
    std::vector<float> values(slice.output.rows * kVocab);
    slice.output.data = values.data();
    queue_->Serve(request);
    request.TakeRows(slice, nullptr);
    request.Conclude(slice);
  }
  Request& Of(const std::shared_ptr<TokenStream>& stream) {
    for (Request& request : queue_->running()) {
      if (&request.stream() == stream.get()) return request;
    }
    throw Error("it does not run");
  }
  using Streams = std::vector<TokenStream*>;

  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::unique_ptr<RunQueue> queue_ =
      std::make_unique<RunQueue>(SchedulerOptions{});
};

TEST_F(RunQueueTest, TheOldestRunAndTheNextGetThePlaces) {
  Limit(2);
  const auto a = Submit({.tokens = 1}), b = Submit(), c = Submit();
  EXPECT_EQ(Round(), (Streams{a.get(), b.get()}));
  Step();
  EXPECT_TRUE(a->done());
  EXPECT_EQ(Round(), (Streams{b.get(), c.get()}));
}

TEST_F(RunQueueTest, TheQueueIsBoundedUntilSomeHaveGone) {
  Limit(1, 1);
  const auto a = Submit({.tokens = 1}), b = Submit();
  EXPECT_THROW(Submit(), QueueFull);
  Round();
  Step();
  EXPECT_NO_THROW(Submit());
  EXPECT_THROW(Submit(), QueueFull);
}

TEST_F(RunQueueTest, WhoWaitsIsNotLookedAt) {
  Limit(2);
  const auto looks_of = [&](size_t waiting) {
    std::vector<std::shared_ptr<TokenStream>> streams;
    for (size_t i = 0; i < waiting + 2; ++i) streams.push_back(Submit());
    Round();
    const size_t before = queue_->looks();
    for (int i = 0; i < 3; ++i) {
      Round();
      Step();
    }
    const size_t looks = queue_->looks() - before;
    for (const auto& stream : streams) {
      stream->Stop(TokenStream::Interrupt::kAbort);
    }
    Round();
    return looks;
  };
  const size_t few = looks_of(1);
  EXPECT_EQ(looks_of(300), few);
}

TEST_F(RunQueueTest, AStreamThatWaitsForItsReaderLeavesItsPlace) {
  Limit(1);
  const auto stream = Submit({.streamed = true});
  const auto next = Submit({.tokens = 1});
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Round(), (Streams{stream.get()}));
    Step();
  }
  EXPECT_EQ(Round(), (Streams{next.get()}));
  stream->NextEvent();
  EXPECT_EQ(Runnable(), (Streams{stream.get(), next.get()}));
  stream->Stop(TokenStream::Interrupt::kCancel);
}

TEST_F(RunQueueTest, WhatIsStoppedEndsWhereverItIs) {
  Limit(1);
  const auto running = Submit(), waiting = Submit(), rest = Submit();
  Round();
  running->Stop(TokenStream::Interrupt::kCancel);
  waiting->Stop(TokenStream::Interrupt::kAbort);
  EXPECT_EQ(Round(), (Streams{rest.get()}));
  EXPECT_EQ(running->Result().finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(waiting->Result().finish_reason, FinishReason::kCancelled);
}

TEST_F(RunQueueTest, ADeadlineWakesTheQueueAndEndsWhatIsLate) {
  Limit(1);
  const auto late = Submit(
      {.streamed = true, .deadline = Clock::now() + std::chrono::hours(1)});
  const auto soon = Submit(
      {.deadline = Clock::now() + std::chrono::milliseconds(20)});
  // The first waits for its reader and the second for a place that is there:
  // both have started, and nobody has anything to do.
  while (!late->waits_for_reader()) {
    Round();
    for (Request* request : queue_->Runnable()) {
      if (&request->stream() == late.get()) Take(*request);
    }
    queue_->Retire();
  }
  while (!soon->done()) Round();
  EXPECT_EQ(soon->Result().finish_reason, FinishReason::kDeadline);
  EXPECT_FALSE(late->done());
}

TEST_F(RunQueueTest, ABatchEndsAsOne) {
  for (const bool fails : {false, true}) {
    Limit(2);
    const auto batch = std::make_shared<Batch>();
    std::list<Request> requests;
    const auto a = Make(requests, {.tokens = 1, .batch = batch});
    const auto b = Make(requests, {.tokens = 3, .batch = batch});
    const auto c = Make(requests, {.tokens = 1, .batch = batch});
    queue_->Submit(std::move(requests));
    Round();
    Step();
    EXPECT_FALSE(a->done()) << "others compute";
    EXPECT_EQ(Round(), (Streams{b.get(), c.get()}));
    if (fails) {
      Of(b).Fail(std::make_exception_ptr(InvalidArgument("no")));
      queue_->Retire();
    } else {
      Step();
      EXPECT_FALSE(c->done());
      EXPECT_EQ(Round(), (Streams{b.get()}));
      Step();
    }
    for (const auto& stream : {a, b, c}) {
      if (fails) {
        EXPECT_THROW((void)stream->Result(), InvalidArgument);
      } else {
        EXPECT_NE(stream->Result().token_ids.size(), 0u);
      }
    }
  }
}

TEST_F(RunQueueTest, TheYoungestOfThePoolGivesWay) {
  const auto a = Submit(), b = Submit(), c = Submit();
  const auto other = Submit({.pool = BlockPool::Create()});
  Round();
  EXPECT_EQ(queue_->FindVictim(Of(a)), nullptr)
      << "nobody has computed anything";
  Step();
  EXPECT_EQ(queue_->FindVictim(Of(a)), &Of(c));
  EXPECT_EQ(queue_->FindVictim(Of(b)), &Of(c));
  EXPECT_EQ(queue_->FindVictim(Of(c)), nullptr);
  EXPECT_FALSE(queue_->OlderCompetes(Of(a)));
  EXPECT_TRUE(queue_->OlderCompetes(Of(c)));
  EXPECT_FALSE(queue_->OlderCompetes(Of(other)));
  queue_->Preempt(Of(c));
  EXPECT_EQ(queue_->preemptions(), 1u);
  EXPECT_EQ(queue_->FindVictim(Of(a)), &Of(b));
  // It starts again when another one has ended, not before.
  EXPECT_EQ(Round(), (Streams{a.get(), b.get(), other.get()}));
  b->Stop(TokenStream::Interrupt::kCancel);
  EXPECT_EQ(Round(), (Streams{a.get(), c.get(), other.get()}));
  EXPECT_TRUE(Of(c).catching_up());
}

TEST_F(RunQueueTest, OneAfterTheOtherComesBack) {
  const auto a = Submit({.tokens = 2}), b = Submit(), c = Submit();
  Round();
  Step();
  queue_->Preempt(Of(c));
  queue_->Preempt(Of(b));
  EXPECT_EQ(Round(), (Streams{a.get()}));
  Step();  // it has said all
  EXPECT_EQ(Round(), (Streams{b.get()})) << "the oldest of its pool";
  Step(10);
  EXPECT_EQ(Round(), (Streams{b.get()})) << "it has not caught up";
  Step();
  EXPECT_EQ(Round(), (Streams{b.get(), c.get()}));
}

TEST_F(RunQueueTest, StreamsThatWaitForReadersGiveWayFirst) {
  const auto stream = Submit({.streamed = true});
  const auto a = Submit({.tokens = 9}), b = Submit({.tokens = 9});
  for (int i = 0; i < 2; ++i) {
    Round();
    Step();
  }
  ASSERT_TRUE(stream->waits_for_reader());
  EXPECT_EQ(queue_->FindVictim(Of(a)), &Of(stream)) << "though it is older";
}

TEST_F(RunQueueTest, ABatchTakesNothingFromItsOwnThatAreDone) {
  const auto batch = std::make_shared<Batch>();
  std::list<Request> requests;
  const auto older = Submit({.tokens = 9});
  const auto a = Make(requests, {.tokens = 9, .batch = batch});
  const auto b = Make(requests, {.tokens = 1, .batch = batch});
  queue_->Submit(std::move(requests));
  Round();
  Step();
  EXPECT_EQ(queue_->FindVictim(Of(a)), nullptr);
  Request* const victim = queue_->FindVictim(Of(older));
  ASSERT_NE(victim, nullptr);
  EXPECT_EQ(&victim->stream(), b.get());
  EXPECT_TRUE(victim->is<Request::Settled>());
  older->Stop(TokenStream::Interrupt::kAbort);
}

TEST_F(RunQueueTest, TheYoungestFailsForWantOfMemory) {
  Limit(1);
  const auto a = Submit(), b = Submit();
  const auto no_memory = std::make_exception_ptr(std::bad_alloc());
  Round();
  queue_->FailYoungest(no_memory);
  queue_->Retire();
  EXPECT_THROW((void)b->Result(), std::bad_alloc);
  EXPECT_EQ(Round(), (Streams{a.get()}));
  queue_->FailYoungest(no_memory);
  EXPECT_THROW((void)a->Result(), std::bad_alloc);
  queue_->FailYoungest(no_memory);  // nobody is left
}

// ---- Those that wait for the prefix cache ----

TEST_F(RunQueueTest, WhoFollowsIsPassedOverUntilItsLeaderIsThere) {
  const auto prefix = std::make_shared<PrefixCache>(size_t{64} << 20);
  const PrefixAccess access{
      std::make_shared<PrefixView>(prefix, kFilledFingerprint,
                                   std::span<const uint8_t>(), Ids{})};
  const auto leader = Submit({.prefix = access, .prompt = 300});
  std::vector<std::shared_ptr<TokenStream>> followers;
  for (int i = 0; i < 40; ++i) {
    followers.push_back(Submit({.prefix = access, .prompt = 300}));
  }
  const auto other = Submit();
  EXPECT_EQ(Round(), (Streams{leader.get(), other.get()}));
  Step(100);
  const size_t before = queue_->looks();
  EXPECT_EQ(Round(), (Streams{leader.get(), other.get()}));
  Step(100);
  EXPECT_LT(queue_->looks() - before, 40u) << "they are not looked at";
  EXPECT_EQ(Round(), (Streams{leader.get(), other.get()}));
  Step(99);
  const Streams all = Round();
  ASSERT_EQ(all.size(), 42u);
  EXPECT_EQ(all[0], leader.get());
  EXPECT_EQ(all[1], followers[0].get()) << "the oldest first";
  EXPECT_EQ(all[41], other.get());
  EXPECT_EQ(Of(followers[7]).ToPlan().next, 299u);
}

TEST_F(RunQueueTest, AFollowerOfWhatIsStoppedGoesOn) {
  const auto prefix = std::make_shared<PrefixCache>(size_t{64} << 20);
  const PrefixAccess access{
      std::make_shared<PrefixView>(prefix, kFilledFingerprint,
                                   std::span<const uint8_t>(), Ids{})};
  const auto leader = Submit({.prefix = access, .prompt = 300});
  const auto follower = Submit({.prefix = access, .prompt = 300});
  const auto stopped = Submit({.prefix = access, .prompt = 300});
  EXPECT_EQ(Round(), (Streams{leader.get()}));
  stopped->Stop(TokenStream::Interrupt::kAbort);
  leader->Stop(TokenStream::Interrupt::kAbort);
  EXPECT_EQ(Round(), (Streams{follower.get()}));
  EXPECT_TRUE(stopped->done());
}

TEST_F(RunQueueTest, ATierThatAnswersWakesTheQueue) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  const auto prefix = std::make_shared<PrefixCache>(
      size_t{64} << 20, PrefixTiers{disk},
      PrefixTierOptions{.time_out = std::chrono::minutes(10)});
  const auto view = std::make_shared<PrefixView>(
      prefix, kFilledFingerprint, std::span<const uint8_t>(), Ids{});
  view->set_seconds_per_token(1e9);  // worth any wait
  disk->Hang();
  const auto fetches = Submit({.prefix = {view}, .prompt = 300});
  EXPECT_EQ(Round(), Streams{});
  auto round = std::async(std::launch::async, [&] { return Round(); });
  disk->Release();
  EXPECT_EQ(round.get(), (Streams{fetches.get()}));
}

TEST_F(RunQueueTest, ATiersTimeEnds) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  const auto prefix = std::make_shared<PrefixCache>(
      size_t{64} << 20, PrefixTiers{disk},
      PrefixTierOptions{.time_out = std::chrono::milliseconds(20)});
  const auto view = std::make_shared<PrefixView>(
      prefix, kFilledFingerprint, std::span<const uint8_t>(), Ids{});
  view->set_seconds_per_token(1e9);
  disk->Hang();
  const auto fetches = Submit({.prefix = {view}, .prompt = 300});
  Streams round;
  while (round.empty()) round = Round();
  EXPECT_EQ(round, (Streams{fetches.get()}));
  disk->Release();
}

// ---- The end ----

TEST_F(RunQueueTest, StoppingEndsAllAndThenTheLoop) {
  Limit(1);
  const auto running = Submit(), waiting = Submit();
  Round();
  const auto incoming = Submit();
  queue_->Stop();
  EXPECT_EQ(Round(), Streams{});
  for (const auto& stream : {running, waiting, incoming}) {
    EXPECT_EQ(stream->Result().finish_reason, FinishReason::kCancelled);
  }
  EXPECT_FALSE(queue_->WaitForWork());
}

}  // namespace
}  // namespace gkv
