#include "base/worker.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "base/no_threads.h"

namespace gkv {
namespace {

using Clock = Worker::Clock;

// Far longer than anything takes, also on a machine that others keep busy.
Clock::time_point Late() { return Clock::now() + std::chrono::minutes(1); }

TEST(WorkerTest, RunsTasksInTheirOrder) {
  Worker worker;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    worker.Post([&order, i] { order.push_back(i); });
  }
  worker.Wait();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  // There is nothing to wait for any more.
  EXPECT_TRUE(worker.Wait(Clock::now()));
}

TEST(WorkerTest, RunsThemOnOneThread) {
  Worker worker;
  std::vector<std::thread::id> threads;
  for (int i = 0; i < 3; ++i) {
    worker.Post([&] { threads.push_back(std::this_thread::get_id()); });
    worker.Wait();
  }
  EXPECT_NE(threads[0], std::this_thread::get_id());
  EXPECT_EQ(threads[0], threads[1]);
  EXPECT_EQ(threads[0], threads[2]);
}

TEST(WorkerTest, WaitsNoLongerThanItIsTo) {
  Worker worker;
  std::promise<void> go_on;
  worker.Post([&] { go_on.get_future().wait(); });
  EXPECT_FALSE(worker.Wait(Clock::now() + std::chrono::milliseconds(1)));
  go_on.set_value();
  EXPECT_TRUE(worker.Wait(Late()));
}

TEST(WorkerTest, ItsEndIsThatOfItsTasks) {
  int ran = 0;
  {
    Worker worker;
    for (int i = 0; i < 10; ++i) worker.Post([&] { ++ran; });
  }
  EXPECT_EQ(ran, 10);
  const Worker never_used;
}

// Whoever hears that a task has run finds what it held given back.
TEST(WorkerTest, ATaskIsDestroyedBeforeItCountsAsRun) {
  Worker worker;
  const auto held = std::make_shared<int>(0);
  for (int i = 0; i < 100; ++i) {
    worker.Post([held] {});
    worker.Wait();
    EXPECT_EQ(held.use_count(), 1);
  }
}

TEST(WorkerTest, AbandonedItLeavesTheTaskThatRunsAndDropsTheOthers) {
  struct Shared {
    explicit Shared(std::promise<void>& gone) : gone(gone) {}
    ~Shared() { gone.set_value(); }
    std::promise<void>& gone;
    std::promise<void> begun, go_on;
  };
  std::promise<void> gone;
  bool second_ran = false;
  auto shared = std::make_shared<Shared>(gone);
  {
    Worker worker;
    worker.Post([shared] {
      shared->begun.set_value();
      shared->go_on.get_future().wait();
    });
    worker.Post([shared, &second_ran] { second_ran = true; });
    shared->begun.get_future().wait();
    worker.Abandon();
    worker.Wait();
    EXPECT_EQ(shared.use_count(), 2) << "that of the task which runs";
  }
  shared->go_on.set_value();
  shared.reset();
  gone.get_future().wait();
  EXPECT_FALSE(second_ran);
}

TEST(WorkerTest, AChildOfForkHasNoThread) {
  Worker worker;
  std::promise<void> begun, go_on;
  worker.Post([&] {
    begun.set_value();
    go_on.get_future().wait();
  });
  begun.get_future().wait();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    bool right = worker.in_child();
    worker.Wait();
    right = right && worker.Wait(Clock::now());
    try {
      worker.Post([] {});
      right = false;
    } catch (const std::system_error&) {
    }
    worker.Abandon();
    worker.~Worker();
    _exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(worker.in_child());
  go_on.set_value();
  worker.Wait();
}

// A child may have workers of its own.
TEST(WorkerTest, AChildOfForkMayMakeItsOwn) {
  Worker before;
  before.Post([] {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    bool ran = false;
    {
      Worker own;
      own.Post([&] { ran = true; });
    }
    _exit(ran ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(WorkerTest, RunsNothingOfWhatItCouldNotPost) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int ran = 0;
    Worker worker;
    {
      const NoThreads none;
      try {
        worker.Post([&] { ran += 1; });
        _exit(1);
      } catch (const std::system_error&) {
      }
      worker.Wait();
    }
    worker.Post([&] { ran += 10; });
    worker.Wait();
    _exit(ran == 10 ? 0 : 2);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace gkv
