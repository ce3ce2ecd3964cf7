#include "base/mutex.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace gkv {
namespace {

// What `child` returns, as its exit code; it is killed if it takes too long.
int StatusOf(const auto& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(60);
    _exit(child() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

// Whether nobody holds it.
bool IsFree(Mutex& mutex) {
  if (!mutex.TryLock()) return false;
  mutex.Unlock();
  return true;
}

// Two that each change of the counts takes both of.
struct Pair {
  Mutex a{AtFork::kWaits}, b{AtFork::kWaits};
  int counts[2] = {0, 0};

  bool IsWhole() {
    const MutexLock first(a), second(b);
    return counts[0] == counts[1];
  }
  // In either order: who gets the first alone lets go of it.
  void Count(bool turned) {
    const MutexLock first(turned ? b : a);
    Mutex& second = turned ? a : b;
    if (!second.TryLock()) return;
    ++counts[0];
    for (int i = 0; i < 1000; ++i) {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    ++counts[1];
    second.Unlock();
  }
};

TEST(MutexTest, AChildFindsThemFree) {
  Pair pair;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (const bool turned : {false, true}) {
    threads.emplace_back([&, turned]() NOT_ANALYZED {
      while (!stop) pair.Count(turned);
    });
  }
  // Others come and go meanwhile, alone and in scopes.
  threads.emplace_back([&] {
    while (!stop) {
      Mutex alone(AtFork::kWaits);
      Condition changed(alone);
      ForkScope scope;
      Mutex one(scope), other(scope);
      const MutexLock lock(alone);
      const MutexLock first(one), second(other);
    }
  });
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(StatusOf([&] { return pair.IsWhole(); }), 0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(pair.IsWhole());
}

TEST(MutexTest, AChildMayForkToo) {
  Pair pair;
  EXPECT_EQ(StatusOf([&] {
              return StatusOf([&] { return pair.IsWhole(); }) == 0;
            }),
            0);
}

TEST(MutexTest, NothingWaitsForOneThatIsLeft) {
  Mutex mutex(AtFork::kLeaves);
  const MutexLock held(mutex);
  EXPECT_EQ(StatusOf([&] { return !IsFree(mutex); }), 0);
}

// The first of a scope that goes takes all out of the list.
TEST(MutexTest, NothingWaitsForAScopeThatEnds) {
  ForkScope scope;
  Mutex longer(scope);
  {
    const Mutex shorter(scope);
  }
  const MutexLock held(longer);
  EXPECT_EQ(StatusOf([&] { return !IsFree(longer); }), 0);
}

TEST(MutexTest, AForkWaitsForWhoHoldsOne) {
  ForkScope scope;
  Mutex alone(AtFork::kWaits), one(scope), other(scope);
  SharedMutex shared(AtFork::kWaits);
  for (int which = 0; which < 5; ++which) {
    std::atomic<bool> held = false;
    const size_t waits = ForkScope::waits();
    std::thread holder([&] {
      const auto hold = [&] {
        held = true;
        held.notify_one();
        while (ForkScope::waits() == waits) std::this_thread::yield();
      };
      if (which < 3) {
        const MutexLock lock(which == 0 ? alone : which == 1 ? one : other);
        hold();
      } else if (which == 3) {
        const ReadLock lock(shared);
        hold();
      } else {
        const WriteLock lock(shared);
        hold();
      }
    });
    held.wait(false);
    EXPECT_EQ(StatusOf([&] {
                if (!IsFree(alone) || !IsFree(one) || !IsFree(other)) {
                  return false;
                }
                { const WriteLock lock(shared); }
                const ReadLock lock(shared);
                return true;
              }),
              0)
        << which;
    holder.join();
  }
}

// At its end a condition waits for those that wait on it.
TEST(MutexTest, AChildHasNobodyWhoWaits) {
  Mutex mutex(AtFork::kWaits);
  std::optional<Condition> changed(std::in_place, mutex);
  bool waits = false, over = false;
  std::thread waiter([&] {
    MutexLock lock(mutex);
    waits = true;
    while (!over) changed->Wait(lock);
  });
  while (true) {
    const MutexLock lock(mutex);
    if (waits) break;  // it has let go of the mutex: it waits
  }
  EXPECT_EQ(StatusOf([&] {
              changed->NotifyOne();
              changed.reset();
              return true;
            }),
            0);
  {
    const MutexLock lock(mutex);
    over = true;
  }
  changed->NotifyAll();
  waiter.join();
}

TEST(MutexTest, WaitsAsLongAsItIsTo) {
  using Clock = std::chrono::steady_clock;
  Mutex mutex(AtFork::kLeaves);
  Condition changed(mutex);
  MutexLock lock(mutex);
  EXPECT_FALSE(changed.WaitUntil(lock, Clock::now()));
  EXPECT_FALSE(changed.WaitFor(lock, std::chrono::milliseconds(1),
                               [] { return false; }));
  EXPECT_TRUE(changed.WaitFor(lock, std::chrono::minutes(1),
                              [] { return true; }));
  lock.Unlock();
  EXPECT_TRUE(IsFree(mutex));
  lock.Lock();
  EXPECT_FALSE(IsFree(mutex));
}

}  // namespace
}  // namespace gkv
