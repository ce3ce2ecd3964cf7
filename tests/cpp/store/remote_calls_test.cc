#include "store/remote_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "store/eventually.h"

namespace gkv {
namespace {

using namespace std::chrono_literals;
using Call = RemoteCalls::Call;
using enum RemoteCalls::Side;
using Clock = std::chrono::steady_clock;

// Holds who comes by until it is opened.
class Gate {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    ++passed_;
    changed_.notify_all();
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void WaitForWaiting(int count) {
    Wait([&] { return waiting_ >= count; });
  }
  void WaitForPassed(int count) {
    Wait([&] { return passed_ >= count; });
  }

 private:
  template <typename Condition>
  void Wait(const Condition& condition) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, condition);
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0, passed_ = 0;
};

RemoteCallOptions Options() {
  return {.timeout = 100ms,
          .first_backoff = 50ms,
          .longest_backoff = 200ms,
          .max_calls = 3};
}

// For calls that are not to be late, however busy the machine is.
RemoteCallOptions Patient() {
  RemoteCallOptions options = Options();
  options.timeout = 20s;
  return options;
}

// Nothing is tried again.
RemoteCallOptions Unforgiving() {
  RemoteCallOptions options = Patient();
  options.first_backoff = options.longest_backoff = 24h;
  return options;
}

void Nothing(Call&) {}
void Fail(Call&) { throw std::runtime_error("no such luck"); }

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

TEST(RemoteCallsTest, RunsOnAnotherThreadAndEnds) {
  RemoteCalls calls(Patient(), Nothing);
  std::thread::id id;
  EXPECT_TRUE(calls.Run(kRead, [&](Call& call) {
    EXPECT_TRUE(call.Step());
    id = std::this_thread::get_id();
  }));
  EXPECT_NE(id, std::this_thread::get_id());
  const RemoteCallStats stats = calls.stats();
  EXPECT_EQ(stats.calls, 1u);
  EXPECT_EQ(stats.running, 0u);
  EXPECT_EQ(stats.failures + stats.timeouts + stats.refused, 0u);
}

TEST(RemoteCallsTest, AFailureOpensItsSideAndAProbeClosesIt) {
  std::atomic<bool> dead = true;
  std::atomic<int> probes = 0;
  const auto probe = [&](Call&) {
    ++probes;
    if (dead) throw std::runtime_error("dead");
  };
  int ran = 0;
  const auto count = [&](Call&) { ++ran; };
  {
    RemoteCalls calls(Unforgiving(), probe);
    EXPECT_FALSE(calls.Run(kRead, Fail));
    const RemoteCallStats stats = calls.stats();
    EXPECT_TRUE(stats.reads_open);
    EXPECT_FALSE(stats.writes_open);
    EXPECT_EQ(stats.failures, 1u);
    EXPECT_EQ(stats.last_error, "no such luck");
    // Nothing is asked while it is open, neither side.
    EXPECT_FALSE(calls.Run(kRead, count));
    EXPECT_FALSE(calls.Run(kWrite, count));
    EXPECT_EQ(ran, 0);
    EXPECT_EQ(probes, 0);
  }
  RemoteCalls calls(Patient(), probe);
  EXPECT_FALSE(calls.Run(kRead, Fail));
  EXPECT_TRUE(Eventually([&] {
    EXPECT_FALSE(calls.Run(kRead, count));
    return probes >= 2;
  }));
  dead = false;
  EXPECT_TRUE(Eventually([&] { return calls.Run(kRead, count); }));
  EXPECT_EQ(ran, 1);
  EXPECT_FALSE(calls.stats().reads_open);
}

TEST(RemoteCallsTest, BackoffDoublesUpToItsLimit) {
  std::atomic<int> probes = 0;
  RemoteCallOptions options = Patient();
  options.first_backoff = 10ms;
  options.longest_backoff = 40ms;
  RemoteCalls calls(options, [&](Call&) {
    ++probes;
    throw std::runtime_error("dead");
  });
  const auto since = Clock::now();
  calls.Run(kRead, Fail);
  EXPECT_TRUE(Eventually([&] {
    calls.Run(kRead, Nothing);
    return probes >= 6;
  }));
  // At 10, 30, 70, 110, 150, 190 ms, or later on a busy machine.
  EXPECT_LE(probes, 2 + static_cast<int>((Seconds(since) - 0.03) / 0.04));
}

TEST(RemoteCallsTest, AFailedWriteLeavesReadingAlone) {
  {
    RemoteCalls calls(Unforgiving(), Nothing);
    EXPECT_FALSE(calls.Run(kWrite, Fail));
    EXPECT_TRUE(calls.stats().writes_open);
    EXPECT_TRUE(calls.Run(kRead, Nothing));
    int ran = 0;
    EXPECT_FALSE(calls.Run(kWrite, [&](Call&) { ++ran; }));
    EXPECT_EQ(ran, 0);
  }
  // One is let through after the back-off.
  RemoteCalls calls(Patient(), Nothing);
  EXPECT_FALSE(calls.Run(kWrite, Fail));
  EXPECT_TRUE(Eventually([&] { return calls.Run(kWrite, Nothing); }));
  EXPECT_FALSE(calls.stats().writes_open);
}

TEST(RemoteCallsTest, ALateReadIsAbandonedAndOpensBothSides) {
  const auto gate = std::make_shared<Gate>();
  RemoteCallOptions options = Options();
  options.timeout = 1s;
  RemoteCalls calls(options, Nothing);
  std::atomic<bool> went_on = false;
  const auto since = Clock::now();
  EXPECT_FALSE(calls.Run(kRead, [gate, &went_on](Call& call) {
    call.Step();  // false if its thread has begun too late
    gate->Pass();
    went_on = call.Step();
  }));
  EXPECT_GE(Seconds(since), 1.0);
  EXPECT_TRUE(Eventually([&] { return calls.stats().reads_open; }));
  RemoteCallStats stats = calls.stats();
  EXPECT_TRUE(stats.writes_open);
  EXPECT_EQ(stats.timeouts, 1u);
  EXPECT_EQ(stats.running, 1u);
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return calls.stats().running == 0; }));
  EXPECT_FALSE(went_on);  // nobody waits for its next step
}

// A read that came forward and ran out of time is not a dead remote, but costs
// nobody else a time-out before that is known.
TEST(RemoteCallsTest, CallsAreRefusedUntilALateStepIsJudged) {
  RemoteCallOptions options = Options();
  options.timeout = 300ms;
  bool refused = false, forgiven = false;
  // A machine may be too slow for the last step, for the second call, or for
  // the end of the first one.
  for (int i = 0; i < 20 && !forgiven; ++i) {
    const auto gate = std::make_shared<Gate>();
    RemoteCalls calls(options, Nothing);
    EXPECT_FALSE(calls.Run(kRead, [gate](Call& call) {
      // Comes forward for as long as somebody waits, 1 ms a step.
      while (call.Step()) std::this_thread::sleep_for(1ms);
      gate->Pass();
    }));
    const auto ran = std::make_shared<std::atomic<int>>(0);
    const bool went = calls.Run(kRead, [ran](Call&) { ++*ran; });
    const RemoteCallStats stats = calls.stats();
    refused = stats.opened == 0;  // what is late was not judged before that
    if (refused) {
      EXPECT_FALSE(went);
      EXPECT_EQ(*ran, 0);
      EXPECT_EQ(stats.timeouts, 1u);
      EXPECT_EQ(stats.refused, 1u);
    }
    gate->Open();
    EXPECT_TRUE(Eventually([&] { return calls.stats().running == 0; }));
    if (!refused) continue;
    EXPECT_TRUE(Eventually([&] { return calls.Run(kRead, Nothing); }));
    const RemoteCallStats after = calls.stats();
    forgiven = after.opened <= 2 * (after.timeouts - 1);
  }
  EXPECT_TRUE(forgiven);
}

TEST(RemoteCallsTest, AWriteHasATimeoutForEachStep) {
  RemoteCallOptions options = Options();
  options.timeout = 300ms;
  // Does short steps for so long, or until nobody waits for it any more.
  const auto runs = [&](RemoteCalls::Side side, double seconds) {
    RemoteCalls calls(options, Nothing);
    return calls.Run(side, [seconds](Call& call) {
      const auto since = Clock::now();
      while (Seconds(since) < seconds && call.Step()) {
        std::this_thread::sleep_for(1ms);
      }
    });
  };
  EXPECT_FALSE(runs(kRead, 600));
  bool written = false;  // a step may be late for once
  for (int i = 0; i < 20 && !written; ++i) written = runs(kWrite, 0.45);
  EXPECT_TRUE(written);
}

// However many calls hang, threads are bounded, and a remote that lives again
// is found once one of them comes back.
TEST(RemoteCallsTest, HungThreadsAreBounded) {
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> begun = 0;
  const auto hang = [gate, &begun](Call&) {
    ++begun;
    gate->Pass();
  };
  RemoteCalls calls(Options(), hang);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { EXPECT_FALSE(calls.Run(kRead, hang)); });
  }
  for (std::thread& thread : threads) thread.join();
  const uint64_t timeouts = calls.stats().timeouts;
  EXPECT_TRUE(Eventually([&] {
    EXPECT_FALSE(calls.Run(kRead, hang));
    return calls.stats().running == 3;
  }));
  // For longer than any back-off: nothing that is seen tells of its end.
  for (const auto since = Clock::now(); Seconds(since) < 0.25;) {
    EXPECT_FALSE(calls.Run(kRead, hang));
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(calls.stats().timeouts, timeouts) << "no time-out any more";
  EXPECT_LE(begun, 3);
  EXPECT_LE(calls.stats().running, 3u);
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return calls.Run(kRead, Nothing); }));
  // They refer to what ends here.
  EXPECT_TRUE(Eventually([&] { return calls.stats().running == 0; }));
}

TEST(RemoteCallsTest, AHungProbeIsNotWaitedForForEver) {
  const auto gate = std::make_shared<Gate>();
  std::atomic<int> probes = 0;
  RemoteCalls calls(Options(), [gate, &probes](Call&) {
    if (++probes == 1) gate->Pass();
  });
  EXPECT_FALSE(calls.Run(kRead, Fail));
  EXPECT_TRUE(Eventually([&] { return calls.Run(kRead, Nothing); }));
  EXPECT_GE(probes, 2);
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return calls.stats().running == 0; }));
  EXPECT_TRUE(Eventually([&] { return calls.Run(kRead, Nothing); }));
  // Probes refer to what ends here.
  EXPECT_TRUE(Eventually([&] { return calls.stats().running == 0; }));
}

TEST(RemoteCallsTest, MayGoWhileCallsHang) {
  const auto gate = std::make_shared<Gate>();
  const auto owned = std::make_shared<int>(7);
  {
    RemoteCalls calls(Options(), Nothing);
    EXPECT_FALSE(calls.Run(kRead, [gate, owned](Call& call) {
      gate->Pass();
      EXPECT_FALSE(call.Step());
      EXPECT_EQ(*owned, 7);
    }));
  }
  EXPECT_EQ(owned.use_count(), 2);
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return owned.use_count() == 1; }));
}

TEST(RemoteCallsTest, WorkIsGoneWhenRunReturns) {
  RemoteCalls calls(Patient(), Nothing);
  for (int i = 0; i < 200; ++i) {
    const auto owned = std::make_shared<int>(i);
    calls.Run(kWrite, [owned](Call&) {});
    EXPECT_EQ(owned.use_count(), 1);
  }
}

TEST(RemoteCallsTest, ManyThreadsShareFewCalls) {
  RemoteCallOptions options = Options();
  options.timeout = 60s;
  RemoteCalls calls(options, Nothing);
  std::atomic<int> inside = 0, most = 0, ran = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_TRUE(calls.Run(t % 2 == 0 ? kRead : kWrite, [&](Call&) {
          const int now = ++inside;
          int before = most;
          while (before < now && !most.compare_exchange_weak(before, now)) {
          }
          ++ran;
          --inside;
        }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, 400);
  EXPECT_LE(most, 3);
}

}  // namespace
}  // namespace gkv
