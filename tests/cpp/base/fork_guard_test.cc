#include "base/fork_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace gkv {
namespace {

// Whether a child can lock all of them, and each pair of counts is equal: who
// changes them holds both mutexes.
int InChild(std::mutex& a, std::mutex& b, const int (&counts)[2]) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const std::scoped_lock lock(a, b);
    _exit(counts[0] == counts[1] ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(ForkGuardTest, AChildFindsThemFree) {
  std::mutex a, b;
  int counts[2] = {0, 0};
  const ForkGuard first(a), second(b);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (const bool turned : {false, true}) {
    threads.emplace_back([&, turned] {
      while (!stop) {
        const std::scoped_lock lock(turned ? b : a, turned ? a : b);
        ++counts[0];
        for (int i = 0; i < 1000; ++i)
          std::atomic_signal_fence(std::memory_order_seq_cst);
        ++counts[1];
      }
    });
  }
  // Guards come and go meanwhile.
  threads.emplace_back([&] {
    while (!stop) {
      std::mutex mutex;
      const ForkGuard guard(mutex);
      const std::lock_guard lock(mutex);
    }
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(InChild(a, b, counts), 0);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const std::scoped_lock lock(a, b);
  EXPECT_EQ(counts[0], counts[1]);
}

TEST(ForkGuardTest, AChildMayForkToo) {
  std::mutex a, b;
  const int counts[2] = {0, 0};
  const ForkGuard first(a), second(b);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(InChild(a, b, counts) == 0 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// It is not waited for one whose guard is gone.
TEST(ForkGuardTest, WithoutAGuardNothingIsLocked) {
  std::mutex a, b;
  const int counts[2] = {0, 0};
  {
    const ForkGuard guard(a);
  }
  const std::unique_lock held(a);
  const pid_t child = fork();
  if (child == 0) _exit(counts[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// What `child` returns, as its exit code; it is killed if it takes too long.
int StatusOf(const auto& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    _exit(child() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

TEST(ForkGuardTest, AForkWaitsForWhoHoldsOne) {
  std::mutex mutex;
  std::shared_mutex shared;
  const ForkGuard first(mutex), second(shared);
  for (const bool writes : {false, true}) {
    std::atomic<bool> held = false;
    const size_t waits = ForkGuard::waits();
    std::thread holder([&] {
      std::unique_lock one(mutex, std::defer_lock);
      std::shared_lock reading(shared, std::defer_lock);
      std::unique_lock writing(shared, std::defer_lock);
      writes ? writing.lock() : reading.lock();
      one.lock();
      held = true;
      held.notify_one();
      while (ForkGuard::waits() == waits) std::this_thread::yield();
    });
    held.wait(false);
    EXPECT_EQ(StatusOf([&] {
                if (!mutex.try_lock() || !shared.try_lock()) return false;
                shared.unlock();
                return shared.try_lock_shared();
              }),
              0);
    holder.join();
  }
}

// At its end a variable waits for those that wait on it.
TEST(ForkGuardTest, AChildHasNobodyWhoWaits) {
  std::mutex mutex;
  std::optional<std::condition_variable> changed(std::in_place);
  std::optional<ForkGuard> guard(std::in_place, mutex, &*changed);
  bool waits = false, over = false;
  std::thread waiter([&] {
    std::unique_lock lock(mutex);
    waits = true;
    changed->wait(lock, [&] { return over; });
  });
  while (true) {
    const std::lock_guard lock(mutex);
    if (waits) break;  // it has let go of the mutex: it waits
  }
  EXPECT_EQ(StatusOf([&] {
              changed->notify_one();
              guard.reset();
              changed.reset();
              return true;
            }),
            0);
  {
    const std::lock_guard lock(mutex);
    over = true;
  }
  changed->notify_all();
  waiter.join();
}

}  // namespace
}  // namespace gkv
