#include "base/fork_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
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

}  // namespace
}  // namespace gkv
