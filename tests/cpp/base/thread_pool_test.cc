#include "base/thread_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/sanitized.h"
#include "gtest/gtest.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gkv {
namespace {

constexpr int kLoops = kSanitized ? 2000 : 20000;

class ThreadPoolTest : public ::testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest,
                         ::testing::Values(1, 2, 3, 5, 16));

// Loops in quick succession with ever other bodies: a worker that is late from
// one loop must not run a task of the next with the body of the last.
TEST_P(ThreadPoolTest, EveryTaskRunsOnceInItsOwnLoop) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.num_threads(), GetParam());
  std::mt19937 rng(1);
  std::vector<int> counts(40);  // plain ints: the pool orders the accesses
  for (int loop = 0; loop < kLoops; ++loop) {
    const size_t tasks = rng() % counts.size();
    const int stamp = loop + 1;
    std::vector<int> bodies(tasks, -1);
    pool.Run(tasks, [&](size_t task, size_t) {
      ++counts[task];
      bodies[task] = stamp;
    });
    for (size_t task = 0; task < counts.size(); ++task) {
      ASSERT_EQ(counts[task], task < tasks ? 1 : 0)
          << "task " << task << " of " << tasks << " in loop " << loop;
      counts[task] = 0;
    }
    ASSERT_EQ(bodies, std::vector<int>(tasks, stamp));
  }
}

TEST_P(ThreadPoolTest, TasksOfUnequalLength) {
  ThreadPool pool(GetParam());
  std::mt19937 rng(2);
  for (int loop = 0; loop < kLoops / 100; ++loop) {
    const size_t tasks = 1 + rng() % 9;
    const size_t slow = rng() % tasks;
    std::vector<int> done(tasks);
    pool.Run(tasks, [&](size_t task, size_t) {
      if (task == slow) {
        // Long enough for the others, the caller too, to park: no state tells.
        std::this_thread::sleep_for(std::chrono::microseconds(400));
      }
      ++done[task];
    });
    for (const int count : done) ASSERT_EQ(count, 1);
  }
}

TEST_P(ThreadPoolTest, PausesBetweenLoops) {
  ThreadPool pool(GetParam());
  std::mt19937 rng(3);
  for (int loop = 0; loop < kLoops / 50; ++loop) {
    std::atomic<int> done{0};
    pool.Run(7, [&](size_t, size_t) { ++done; });
    ASSERT_EQ(done, 7);
    // Around the time at which workers go from spinning to parking.
    std::this_thread::sleep_for(std::chrono::microseconds(rng() % 400));
  }
}

TEST_P(ThreadPoolTest, ThreadNumbersAreInRangeAndExclusive) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(GetParam());
  std::atomic<bool> good{true};
  pool.Run(2000, [&](size_t, size_t thread) {
    if (thread >= inside.size() || inside[thread]++ != 0) {
      good = false;
      return;
    }
    --inside[thread];
  });
  EXPECT_TRUE(good);
}

// Writes before Run are seen by tasks, and those of tasks after Run.
TEST_P(ThreadPoolTest, ResultsOfOneLoopFeedTheNext) {
  ThreadPool pool(GetParam());
  std::vector<uint64_t> values(64, 1), next(64);
  for (int loop = 0; loop < 40; ++loop) {
    pool.Run(values.size(), [&](size_t i, size_t) {
      next[i] = values[i] + values[(i + 1) % values.size()];
    });
    std::swap(values, next);
  }
  for (const uint64_t value : values) EXPECT_EQ(value, uint64_t{1} << 40);
}

TEST(ThreadPoolTest, HandsOutTasksInAscendingOrder) {
  ThreadPool pool(1);
  std::vector<size_t> order;
  pool.Run(100, [&](size_t task, size_t) { order.push_back(task); });
  std::vector<size_t> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST(ThreadPoolTest, WorkersTakePart) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> tasks_of(3);
  std::atomic<int> taking_part{0};
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  pool.Run(30, [&](size_t, size_t thread) {
    if (tasks_of[thread]++ == 0) ++taking_part;
    // Until all do: a thread may get no processor for a while.
    while (taking_part < 3 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  for (const auto& count : tasks_of) EXPECT_GT(count, 0);
}

TEST_P(ThreadPoolTest, EachThreadHasScratchOfItsOwn) {
  ThreadPool pool(GetParam());
  for (size_t thread = 0; thread < pool.num_threads(); ++thread) {
    uint8_t* const scratch = pool.scratch(thread);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(scratch) % kAlignment, 0u);
    std::memset(scratch, static_cast<int>(thread), ThreadPool::kScratchBytes);
  }
  std::atomic<bool> good{true};
  pool.Run(100, [&](size_t, size_t thread) {
    uint8_t* const scratch = pool.scratch(thread);
    if (std::any_of(scratch, scratch + ThreadPool::kScratchBytes,
                    [&](uint8_t byte) { return byte != thread; })) {
      good = false;
    }
  });
  EXPECT_TRUE(good);
}

TEST(ThreadPoolTest, SeveralPoolsAtOnce) {
  std::vector<std::thread> users;
  std::atomic<int> total{0};
  for (int user = 0; user < 4; ++user) {
    users.emplace_back([&] {
      ThreadPool pool(3);
      for (int loop = 0; loop < 200; ++loop) {
        pool.Run(11, [&](size_t, size_t) { ++total; });
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(total, 4 * 200 * 11);
}

TEST(ThreadPoolTest, StartsAndStopsManyTimes) {
  std::atomic<int> total{0};
  for (int i = 0; i < 100; ++i) {
    ThreadPool pool(4);
    if (i % 2 == 0) pool.Run(4, [&](size_t, size_t) { ++total; });
  }
  EXPECT_EQ(total, 200);
}

#if defined(__SSE2__)
TEST(ThreadPoolTest, WorkersComputeWithIeeeDefaults) {
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);  // new threads inherit flush-to-zero
  std::vector<unsigned> states(3);
  {
    ThreadPool pool(3);
    std::atomic<int> arrived{0};
    pool.Run(3, [&](size_t, size_t thread) {
      states[thread] = _mm_getcsr();
      // Keeps each thread in its task until all are in theirs.
      ++arrived;
      while (arrived < 3) std::this_thread::yield();
    });
  }
  _mm_setcsr(saved);
  // The status flags are the low six bits.
  for (size_t thread = 1; thread < 3; ++thread) {
    EXPECT_EQ(states[thread] & ~0x3Fu, 0x1F80u) << thread;
  }
}
#endif

TEST(ThreadPoolTest, CountsLoopsThatThreadsShare) {
  const auto nothing = [](size_t, size_t) {};
  ThreadPool alone(1), two(2);
  for (ThreadPool* pool : {&alone, &two}) {
    for (const size_t tasks : {0, 1, 2, 100}) pool->Run(tasks, nothing);
  }
  EXPECT_EQ(alone.parallel_loops(), 0u);
  EXPECT_EQ(two.parallel_loops(), 2u);
}

TEST(ThreadPoolTest, BadNumbersOfThreads) {
  for (const size_t threads : {size_t{0}, ThreadPool::kMaxThreads + 1}) {
    try {
      ThreadPool pool(threads);
      FAIL() << threads;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(std::string(error.what()),
                StrCat("number of threads: expected 1..256, found ", threads));
    }
  }
}

TEST(ThreadPoolTest, AvailableProcessorsIsPositive) {
  EXPECT_GE(ThreadPool::AvailableProcessors(), 1u);
  EXPECT_LE(ThreadPool::AvailableProcessors(), ThreadPool::kMaxThreads);
}

double ProcessorSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) +
           1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(ThreadPoolTest, IdleThreadsUseNoProcessorTime) {
  ThreadPool pool(4);
  pool.Run(100, [](size_t, size_t) {});
  // Who spins does so each time; a thread may be late to park for once.
  double least = 1;
  for (int i = 0; i < 10 && least >= 0.010; ++i) {
    // The time in which they are to park, and one in which who spins is seen.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double before = ProcessorSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    least = std::min(least, ProcessorSeconds() - before);
  }
  EXPECT_LT(least, 0.010);
}

// Runs `body` in a child process and returns its exit code.
template <typename Body>
int InChild(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a hang becomes a failure
    _exit(body());
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(ThreadPoolTest, WorksInAChildOfFork) {
  auto pool = std::make_unique<ThreadPool>(3);
  pool->Run(10, [](size_t, size_t) {});
  const int code = InChild([&] {
    std::vector<int> counts(50);
    std::set<size_t> threads;
    pool->Run(counts.size(), [&](size_t task, size_t thread) {
      ++counts[task];
      threads.insert(thread);
    });
    for (const int count : counts) {
      if (count != 1) return 1;
    }
    if (threads != std::set<size_t>{0}) return 2;
    pool.reset();  // joins nothing
    return 0;
  });
  EXPECT_EQ(code, 0);
  // And the parent's pool is as it was.
  std::atomic<int> done{0};
  pool->Run(50, [&](size_t, size_t) { ++done; });
  EXPECT_EQ(done, 50);
}

TEST(ThreadPoolTest, AThreadThatCannotStartIsAnError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space";
  const int code = InChild([] {
    // Room for a few stacks, not for 255.
    const rlimit limit{1u << 28, 1u << 28};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    try {
      ThreadPool pool(ThreadPool::kMaxThreads);
      return 2;
    } catch (const IoError& error) {
      return error.error_number() == EAGAIN ? 0 : 3;
    }
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace gkv
