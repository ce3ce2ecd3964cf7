// Calls in a child of fork() that was made while another thread held a lock.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "base/watchdog.h"
#include "engine/engine.h"
#include "model/tiny_model.h"

namespace {

// Of threads that say so, the next allocation waits: where it stands under a
// lock, that is held for as long.
thread_local bool stops_in_new = false;
std::atomic<bool> stopped = false;
std::atomic<bool> goes_on = false;

}  // namespace

[[gnu::noinline]] void* operator new(size_t size,
                                     const std::nothrow_t&) noexcept {
  if (std::exchange(stops_in_new, false)) {
    stopped = true;
    stopped.notify_all();
    // As long as nothing waits for what is held.
    const size_t waits = gkv::ForkScope::waits();
    while (!goes_on && gkv::ForkScope::waits() == waits) {
      std::this_thread::yield();
    }
  }
  return std::malloc(size);
}
[[gnu::noinline]] void* operator new(size_t size) {
  void* const memory = ::operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

// What `child` returns, as an exit code; it is killed if it hangs.
int StatusOf(const std::function<bool()>& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    bool right = false;
    try {
      right = child();
    } catch (...) {
    }
    _exit(right ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

// The same, forked while another thread is at the first allocation of `holder`.
int StatusWhile(const std::function<void()>& holder,
                const std::function<bool()>& child) {
  stopped = goes_on = false;
  std::thread thread([&] {
    stops_in_new = true;
    holder();
    stops_in_new = false;
    stopped = true;
    stopped.notify_all();
  });
  stopped.wait(false);
  const int status = StatusOf(child);
  goes_on = true;
  thread.join();
  return status;
}

template <typename E>
bool Throws(const std::function<void()>& call) {
  try {
    call();
  } catch (const E&) {
    return true;
  }
  return false;
}

class ForkTest : public ::testing::Test {
 protected:
  static std::shared_ptr<Engine> Load() {
    MemorySource source = TinyTensors(MixedTypes());
    LoadOptions options;
    options.threads = 2;
    options.profile = true;
    return Engine::FromTensors(TinyConfig(MixedTypes()), source, options);
  }
  std::shared_ptr<Conversation> NewCache() {
    return CreateConversation(gemma_->config(), {.block_tokens = 16});
  }
  static GenerateOptions NoStop(size_t max_tokens) {
    GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    return options;
  }

  const Watchdog watchdog_;
  std::shared_ptr<Engine> gemma_ = Load();
  const Tokens prompt_ = {2, 5, 7};
};

TEST_F(ForkTest, AChildReadsAConversation) {
  const auto cache = NewCache();
  cache->Append(cache->Lock(), prompt_);
  EXPECT_EQ(StatusWhile([&] { cache->tokens(); },
                        [&] {
                          return cache->length() == 3 &&
                                 cache->tokens() == prompt_ &&
                                 cache->Fork()->length() == 3 &&
                                 cache->ToBytes().size() > 3 &&
                                 cache->nbytes() == 0;
                        }),
            0);
  EXPECT_EQ(
      StatusWhile(
          [&] { cache->tokens(); },
          [&] {
            cache->Truncate(1);
            return gemma_->Generate(cache, {}, NoStop(2)).token_ids.size() == 2;
          }),
      0);
  EXPECT_EQ(cache->tokens(), prompt_);
}

TEST_F(ForkTest, AChildIsToldOfAConversationThatIsInUse) {
  const auto cache = NewCache();
  const RunLock lock = cache->Lock();
  const auto on_free = std::make_shared<const std::function<void()>>([] {});
  EXPECT_EQ(
      StatusWhile(
          [&] {
            LockWait wait;
            cache->TryLock(wait, on_free);
          },
          [&] {
            return cache->length() == 0 && !cache->TryLock() &&
                   Throws<Error>([&] { cache->Truncate(0); });
          }),
      0);
}

// Whoever waits for the conversation in the parent is not in the child.
TEST_F(ForkTest, AChildLetsGoOfAConversationThatOthersWaitFor) {
  auto cache = NewCache();
  RunLock lock = cache->Lock();
  std::atomic<int> polls = 0;
  std::thread waiter([&] {
    cache->Lock([&] {
      ++polls;
      polls.notify_all();
    });
  });
  polls.wait(0);
  EXPECT_EQ(StatusOf([&] {
              lock.Release();
              cache.reset();
              return true;
            }),
            0);
  lock.Release();
  waiter.join();
}

TEST_F(ForkTest, AChildLooksAtARequestOfItsParent) {
  const auto cache = NewCache();
  GenerateOptions options = NoStop(40);
  options.top_logprobs = 2;
  const Engine::Job job{cache, prompt_, options, true};
  const auto stream = gemma_->Start({&job, 1})[0];
  while (stream->progress() < 4) std::this_thread::yield();
  // The first event that is read is copied under the lock.
  EXPECT_EQ(StatusWhile([&] { stream->NextEvent(); },
                        [&] {
                          return !stream->done() && !stream->Drained() &&
                                 stream->progress() >= 4 &&
                                 cache->length() >= 4 &&
                                 Throws<Error>([&] { stream->NextEvent(); }) &&
                                 Throws<Error>([&] { stream->WaitDone(); }) &&
                                 !stream->Stop(TokenStream::Interrupt::kCancel);
                        }),
            0);
  stream->Stop(TokenStream::Interrupt::kCancel);
  stream->WaitDone();
}

TEST_F(ForkTest, AChildIsToldOfNoEventsOfItsParent) {
  const Engine::Job job{NewCache(), prompt_, NoStop(40), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  stream->set_on_change([] { ::operator delete(::operator new(1)); });
  EXPECT_EQ(StatusWhile([&] { stream->Tell(); },
                        [&] {
                          stream->set_on_change({});
                          return true;
                        }),
            0);
  stream->set_on_change({});
  stream->Stop(TokenStream::Interrupt::kCancel);
  stream->WaitDone();
}

// Counts and times of a parent that is in the middle of steps.
TEST_F(ForkTest, AChildCountsItsOwnSteps) {
  const Engine::Job job{NewCache(), prompt_, NoStop(400), true};
  const auto stream = gemma_->Start({&job, 1})[0];
  ASSERT_TRUE(stream->NextEvent());
  EXPECT_GT(gemma_->stats().steps, 0u);
  EXPECT_EQ(StatusOf([&] {
              if (gemma_->stats().steps != 0 ||
                  gemma_->stats().preemptions != 0 ||
                  gemma_->profile().phases[0].steps != 0) {
                return false;
              }
              gemma_->Generate(NewCache(), prompt_, NoStop(2));
              return gemma_->stats().steps == 2;
            }),
            0);
  stream->Stop(TokenStream::Interrupt::kCancel);
  stream->WaitDone();
}

// fork() by a logits_processor: nobody in the child waits for its step.
TEST_F(ForkTest, AChildOfAStepMayUseItsModel) {
  int status = -1;
  GenerateOptions options = NoStop(1);
  options.logits_processor = [&](std::span<const int32_t>, std::span<float>) {
    status = StatusOf([&] {
      return gemma_->Generate(NewCache(), prompt_, NoStop(2))
                 .token_ids.size() == 2;
    });
  };
  gemma_->Generate(NewCache(), prompt_, options);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace gkv
