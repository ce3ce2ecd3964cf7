#include "cache/run_lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

// Looks at a lock, 50 ms each: a call that gives up has done so after fewer.
constexpr int kMany = 5;

TEST(RunLockTest, OneAtATime) {
  ForkScope scope;
  RunGate gate(scope);
  int value = 0;  // no atomic: the lock orders
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 500; ++k) {
        const RunLock lock = gate.Lock();
        ++value;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(value, 2000);
}

TEST(RunLockTest, MovesAndIsReleasedOnce) {
  ForkScope scope;
  RunGate gate(scope);
  RunLock a = gate.Lock();
  EXPECT_TRUE(gate.Owns(a));
  EXPECT_FALSE(gate.TryLock());
  RunLock b = std::move(a);
  EXPECT_FALSE(a);
  a.Release();
  EXPECT_FALSE(gate.TryLock()) << "an empty one released it";
  std::thread([&] { b.Release(); }).join();
  b = gate.TryLock();
  EXPECT_TRUE(b);
  EXPECT_EQ(b.serial(), 2u) << "failed attempts are not numbered";
  b = RunLock();
  EXPECT_TRUE(gate.TryLock());
  EXPECT_FALSE(gate.Owns(b));
}

TEST(RunLockTest, PollMayGiveUp) {
  ForkScope scope;
  RunGate gate(scope);
  const RunLock held = gate.Lock();
  int polls = 0;
  EXPECT_THROW(gate.Lock([&] {
                 if (++polls == 3) throw std::runtime_error("enough");
               }),
               std::runtime_error);
  EXPECT_EQ(polls, 3);
}

TEST(RunLockTest, NobodyWaitsForAReader) {
  ForkScope scope;
  RunGate gate(scope);
  const RunLock held = gate.Lock();
  held.set_waits_for_reader(true);
  int looks = 0;
  try {
    gate.Lock([&] { ++looks; });
    FAIL();
  } catch (const Busy& error) {
    EXPECT_NE(std::string(error.what()).find("cancel()"), std::string::npos);
  }
  EXPECT_LT(looks, kMany);
}

TEST(RunLockTest, WaitsForWorkHoweverLong) {
  ForkScope scope;
  RunGate gate(scope);
  RunLock held = gate.Lock();
  held.set_waits_for_reader(true);
  held.set_waits_for_reader(false);
  int looks = 0;
  EXPECT_TRUE(gate.Lock([&] {
    if (++looks == kMany) held.Release();
  }));
  EXPECT_EQ(looks, kMany);
}

// A reader that is at it has time to take what there is, also where a call has
// waited for longer than that before.
TEST(RunLockTest, AReaderHasTimeHoweverLongACallHasWaited) {
  ForkScope scope;
  RunGate gate(scope);
  RunLock held = gate.Lock();
  held.set_waits_for_reader(true);
  int looks = 0;
  EXPECT_NO_THROW(gate.Lock([&] {
    if (++looks == kMany) return held.Release();
    if (looks % 2 == 0) return;
    held.set_waits_for_reader(false);
    held.set_waits_for_reader(true);
  }));
  EXPECT_EQ(looks, kMany);
}

// Attempts far apart, as of an event loop that had no processor: what one finds
// may have waited for as long as the loop itself.
TEST(RunLockTest, AttemptsCountWhatTheyFindAgain) {
  ForkScope scope;
  RunGate gate(scope);
  RunLock held = gate.Lock();
  LockWait wait;
  const auto stand_still = [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
  };
  for (int i = 0; i < kMany; ++i) {
    held.set_waits_for_reader(true);
    stand_still();
    EXPECT_NO_THROW(EXPECT_FALSE(gate.TryLock(wait, nullptr))) << i;
    EXPECT_NO_THROW(EXPECT_FALSE(gate.TryLock(wait, nullptr))) << i;
    held.set_waits_for_reader(false);  // the reader has had its turn
  }
  held.set_waits_for_reader(true);
  stand_still();
  EXPECT_FALSE(gate.TryLock(wait, nullptr));
  EXPECT_FALSE(gate.TryLock(wait, nullptr));
  EXPECT_THROW(gate.TryLock(wait, nullptr), Busy);
}

// The mark belongs to the lock that set it.
TEST(RunLockTest, ReleasingForgetsTheReader) {
  ForkScope scope;
  RunGate gate(scope);
  RunLock held = gate.Lock();
  held.set_waits_for_reader(true);
  held.Release();
  RunLock next = gate.Lock();
  int looks = 0;
  EXPECT_TRUE(gate.Lock([&] {
    if (++looks == kMany) next.Release();
  }));
  EXPECT_EQ(looks, kMany);
}

}  // namespace
}  // namespace gkv
