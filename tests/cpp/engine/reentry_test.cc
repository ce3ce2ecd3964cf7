// Calls by code that a step runs: of the very model, of others, of caches.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/watchdog.h"
#include "engine/constraint.h"
#include "engine/engine.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Streams = std::vector<std::shared_ptr<TokenStream>>;

const Tokens kPrompt = {2, 5, 7};

// What a call comes to.
enum class Outcome { kDone, kBusy, kOther };

Outcome OutcomeOf(const std::function<void()>& call) {
  try {
    call();
    return Outcome::kDone;
  } catch (const Busy&) {
    return Outcome::kBusy;
  } catch (const std::exception&) {
    return Outcome::kOther;
  }
}

class ReentryTest : public ::testing::Test {
 protected:
  static std::shared_ptr<Engine> Load(const SchedulerOptions& scheduler = {}) {
    const TinyOptions tiny = TypesAround();
    MemorySource source = TinyTensors(tiny);
    LoadOptions options;
    options.threads = 2;
    options.scheduler = scheduler;
    return Engine::FromTensors(TinyConfig(tiny), source, options);
  }

  std::shared_ptr<Conversation> NewCache() {
    return CreateConversation(gemma_->config(), {.block_tokens = 16});
  }

  static GenerateOptions NoStop(size_t max_tokens,
                                std::function<void()> processor = {}) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    options.speculate = Speculate::kOff;
    if (processor) {
      options.logits_processor = [processor = std::move(processor)](
                                     std::span<const int32_t>,
                                     std::span<float>) { processor(); };
    }
    return options;
  }

  GenerateResult Generate(Engine& gemma, std::function<void()> processor = {}) {
    return gemma.Generate(NewCache(), kPrompt, NoStop(2, std::move(processor)));
  }

  // Runs `call` as a logits_processor on the scheduler's thread and on a worker
  // of its pool at the same time, once each.
  void OnBothThreads(
      Engine& gemma,
      const std::function<void(size_t row, Conversation& own)>& call) {
    std::barrier together(2);
    std::vector<Engine::Job> jobs;
    std::array<std::thread::id, 2> threads;
    for (size_t row = 0; row < 2; ++row) {
      const auto cache = NewCache();
      const auto processor = [&, row, own = cache.get()] {
        threads[row] = std::this_thread::get_id();
        // One thread cannot come here for both.
        together.arrive_and_wait();
        call(row, *own);
      };
      jobs.push_back({cache, kPrompt, NoStop(1, processor)});
    }
    const Streams streams = gemma.Start(jobs);
    for (const auto& stream : streams) {
      stream->WaitDone();
      EXPECT_EQ(stream->Result().token_ids.size(), 1u);
    }
    EXPECT_NE(threads[0], threads[1]);
  }

  const Watchdog watchdog_;
  std::shared_ptr<Engine> gemma_ = Load();
};

// Each call that waits for the model, or for a cache that a request uses.
TEST_F(ReentryTest, ACallThatWouldWaitForItsOwnStepIsTold) {
  const auto used = NewCache();
  const auto embedded = std::array{std::span<const int32_t>(kPrompt)};
  const Engine::Job job{used, kPrompt, NoStop(40), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  ASSERT_TRUE(stream->NextEvent());
  std::mutex mutex;
  std::vector<std::pair<std::string, Outcome>> found;
  OnBothThreads(*gemma_, [&](size_t, Conversation& own) {
    const auto note = [&](const char* name, const std::function<void()>& call) {
      const Outcome outcome = OutcomeOf(call);
      const std::lock_guard lock(mutex);
      found.emplace_back(name, outcome);
    };
    note("generate", [&] { Generate(*gemma_); });
    note("stream", [&] {
      gemma_->Generate(NewCache(), kPrompt, NoStop(2),
                       [](const TokenEvent&) { return true; });
    });
    note("batch", [&] {
      const Engine::Job jobs[] = {{NewCache(), kPrompt, NoStop(2)},
                                  {NewCache(), kPrompt, NoStop(2)}};
      gemma_->Start(jobs);
    });
    std::vector<float> logits(gemma_->config().vocab_size);
    note("logits", [&] {
      gemma_->StartLogits(NewCache(), kPrompt, false, logits.data());
    });
    note("embed",
         [&] { gemma_->Embed(embedded, {.pooling = Pooling::kLast}); });
    note("next", [&] {
      while (stream->NextEvent()) {
      }
    });
    note("wait", [&] { stream->WaitDone(); });
    note("own truncate", [&] { own.Truncate(0); });
    note("own checkpoint", [&] { own.MakeCheckpoint(); });
    note("own reset", [&] { own.Reset(); });
    note("own append", [&] { own.Append(own.Lock(), kPrompt); });
    note("used truncate", [&] { used->Truncate(0); });
  });
  EXPECT_EQ(found.size(), 24u);
  for (const auto& [name, outcome] : found) {
    EXPECT_EQ(outcome, Outcome::kBusy) << name;
  }
  stream->Stop(TokenStream::Interrupt::kCancel);
  stream->WaitDone();
  EXPECT_EQ(Generate(*gemma_).token_ids.size(), 2u);
}

TEST_F(ReentryTest, ACallThatWaitsForNothingWorks) {
  const auto idle = NewCache();
  gemma_->Generate(idle, kPrompt, NoStop(2));
  std::atomic<int> works = 0;
  OnBothThreads(*gemma_, [&](size_t row, Conversation& own) {
    works += own.length() == 3;
    works += own.tokens() == kPrompt;
    works += own.Fork()->length() == 3;
    works += own.nbytes() + own.shared_nbytes() > 0 || own.computed() == 0;
    works += Conversation::FromBytes(own.ToBytes())->length() == 3;
    if (row == 0) works += idle->Truncate(1).replay_tokens == 0;
    works += gemma_->stats().steps > 0;
  });
  EXPECT_EQ(works, 13);
  EXPECT_EQ(idle->length(), 1u);
}

TEST_F(ReentryTest, AnotherModelMayBeCalled) {
  const auto other = Load();
  const Tokens expected = Generate(*other).token_ids;
  const auto embedded = std::array{std::span<const int32_t>(kPrompt)};
  std::atomic<int> right = 0;
  OnBothThreads(*gemma_, [&](size_t, Conversation&) {
    right += Generate(*other).token_ids == expected;
    Tokens read;
    other->Generate(NewCache(), kPrompt, NoStop(2), [&](const TokenEvent& e) {
      read.push_back(e.token_id);
      return true;
    });
    right += read == expected;
    right += !other->Embed(embedded, {.pooling = Pooling::kLast}).empty();
  });
  EXPECT_EQ(right, 6);
}

// Each has a step that waits for the other one, or would: one is told so, the
// other one gets what it asked for.
TEST_F(ReentryTest, TwoModelsDoNotWaitForEachOther) {
  const auto other = Load();
  for (const bool streamed : {false, true}) {
    std::barrier together(2);
    std::array<Outcome, 2> outcomes{};
    const auto call = [&](Engine& called, size_t which) {
      together.arrive_and_wait();
      outcomes[which] = OutcomeOf([&] {
        called.Generate(NewCache(), kPrompt, NoStop(1),
                        streamed ? [](const TokenEvent&) { return true; }
                                 : std::function<bool(const TokenEvent&)>());
      });
    };
    std::thread thread([&] {
      other->Generate(NewCache(), kPrompt,
                      NoStop(1, [&] { call(*gemma_, 0); }));
    });
    gemma_->Generate(NewCache(), kPrompt, NoStop(1, [&] { call(*other, 1); }));
    thread.join();
    std::sort(outcomes.begin(), outcomes.end());
    EXPECT_EQ(outcomes, (std::array{Outcome::kDone, Outcome::kBusy}));
  }
}

TEST_F(ReentryTest, TwoModelsDoNotReadEachOthersStreams) {
  const auto other = Load();
  const auto start = [&](Engine& gemma) {
    const Engine::Job job{NewCache(), kPrompt, NoStop(40), true};
    return gemma.Start({&job, 1})[0];
  };
  const auto ours = start(*gemma_), theirs = start(*other);
  std::barrier together(2);
  std::array<Outcome, 2> outcomes{};
  const auto read = [&](TokenStream& stream, size_t which) {
    together.arrive_and_wait();
    outcomes[which] = OutcomeOf([&] {
      // More than what there is without a step.
      for (int i = 0; i < 10; ++i) stream.NextEvent();
    });
  };
  std::thread thread([&] {
    other->Generate(NewCache(), kPrompt, NoStop(1, [&] { read(*ours, 0); }));
  });
  gemma_->Generate(NewCache(), kPrompt, NoStop(1, [&] { read(*theirs, 1); }));
  thread.join();
  std::sort(outcomes.begin(), outcomes.end());
  EXPECT_EQ(outcomes, (std::array{Outcome::kDone, Outcome::kBusy}));
}

TEST_F(ReentryTest, ThreeModelsDoNotWaitInACircle) {
  const auto second = Load(), third = Load();
  Outcome outcome = Outcome::kOther;
  Generate(*gemma_, [&] {
    Generate(*second, [&] {
      Generate(*third,
               [&] { outcome = OutcomeOf([&] { Generate(*gemma_); }); });
    });
  });
  EXPECT_EQ(outcome, Outcome::kBusy);
  // What is over binds nobody.
  Generate(*third, [&] { outcome = OutcomeOf([&] { Generate(*gemma_); }); });
  EXPECT_EQ(outcome, Outcome::kDone);
}

// Allows all, and calls something where it is asked.
class Caller : public Constraint {
 public:
  Caller(std::function<void()> at_mask, std::function<void()> at_forced)
      : at_mask_(std::move(at_mask)), at_forced_(std::move(at_forced)) {}

  bool ComputeMask(std::span<uint32_t> mask) override {
    at_mask_();
    std::fill(mask.begin(), mask.end(), ~uint32_t{0});
    mask.back() = 1;
    return true;
  }
  size_t Forced(std::span<int32_t>) override {
    at_forced_();
    return 0;
  }
  void Accept(int32_t) override {}
  void Rollback(size_t) override {}
  std::unique_ptr<Constraint> Clone() const override {
    return std::make_unique<Caller>(*this);
  }

 private:
  std::function<void()> at_mask_, at_forced_;
};

TEST_F(ReentryTest, AConstraintThatCallsItsModelIsTold) {
  gemma_ = Load({.always_guess = true});
  const auto cache = NewCache();
  std::array<std::vector<Outcome>, 2> outcomes;
  const auto call = [&](size_t which) {
    outcomes[which].push_back(OutcomeOf([&] { Generate(*gemma_); }));
    outcomes[which].push_back(OutcomeOf([&] { cache->Truncate(0); }));
  };
  GenerateOptions options = NoStop(3);
  options.speculate = Speculate::kLookup;
  const Engine::Job job{.cache = cache,
                        .prompt = kPrompt,
                        .options = options,
                        .constraint = std::make_shared<Caller>(
                            [&] { call(0); }, [&] { call(1); })};
  const auto stream = gemma_->Start({&job, 1})[0];
  stream->WaitDone();
  EXPECT_EQ(stream->Result().token_ids.size(), 3u);
  for (const auto& each : outcomes) {
    EXPECT_GE(each.size(), 2u);
    for (const Outcome outcome : each) EXPECT_EQ(outcome, Outcome::kBusy);
  }
}

// The last reference to a model goes inside a step of it, or of another one.
TEST_F(ReentryTest, AStepMayLetGoOfAModel) {
  Generate(*gemma_);
  for (const bool own : {true, false}) {
    auto model = Load();
    std::shared_ptr<Engine>* const gone = own ? &model : &gemma_;
    std::promise<void> started;
    const std::shared_future<void> has_started = started.get_future().share();
    std::barrier together(2);
    std::vector<Engine::Job> jobs;
    for (size_t row = 0; row < 2; ++row) {
      jobs.push_back(
          {NewCache(), kPrompt, NoStop(3, [&, row, calls = 0]() mutable {
             if (calls++ > 0) return;
             has_started.wait();
             together.arrive_and_wait();
             if (row == 0) gone->reset();
           })});
    }
    const Streams streams = model->Start(jobs);
    started.set_value();
    for (const auto& stream : streams) {
      stream->WaitDone();
      // Cancelled, if that came in time.
      EXPECT_LE(stream->Result().token_ids.size(), 3u);
    }
    EXPECT_EQ(model == nullptr, own);
  }
}

}  // namespace
}  // namespace gkv
