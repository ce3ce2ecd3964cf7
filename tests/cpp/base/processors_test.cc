#include "base/processors.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/says.h"
#include "base/thread_pool.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

// A folder as the system's, of a machine that is not this one.
class ProcessorsTest : public ::testing::Test {
 protected:
  ProcessorsTest()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                StrCat("processors.", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~ProcessorsTest() override { std::filesystem::remove_all(folder_); }

  void AddCore(const std::string& siblings, std::initializer_list<int> ids,
               int node) {
    for (const int id : ids) {
      const auto own = folder_ / StrCat("cpu", id);
      std::filesystem::create_directories(own / "topology");
      std::filesystem::create_directories(own / StrCat("node", node));
      std::filesystem::create_directories(own / "node_modules");
      std::ofstream(own / "topology/thread_siblings_list") << siblings << '\n';
    }
  }
  // Two nodes of two cores with two processors each, numbered as servers are:
  // first one of each core, then the others.
  void AddServer() {
    AddCore("0,4", {0, 4}, 0);
    AddCore("1,5", {1, 5}, 0);
    AddCore("2,6", {2, 6}, 1);
    AddCore("3,7", {3, 7}, 1);
  }
  std::vector<Processor> Order(const std::vector<int>& ids) const {
    return PlacementOrder(DescribeProcessors(ids, folder_));
  }

  const std::filesystem::path folder_;
};

std::vector<int> Ids(std::span<const Processor> processors) {
  std::vector<int> ids;
  for (const Processor& p : processors) ids.push_back(p.id);
  return ids;
}

TEST_F(ProcessorsTest, OneOfEachCoreFirstNodeAfterNode) {
  AddServer();
  const std::vector<Processor> order = Order({0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(Ids(order), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(order[6], (Processor{6, 2, 1}));
  // Whatever the order of the ids.
  EXPECT_EQ(Order({7, 3, 5, 1, 6, 2, 4, 0}), order);
}

TEST_F(ProcessorsTest, NeighboursOfACoreWait) {
  AddCore("0-1", {0, 1}, 0);
  AddCore("2-3", {2, 3}, 0);
  AddCore("4-5", {4, 5}, 1);
  EXPECT_EQ(Ids(Order({0, 1, 2, 3, 4, 5})),
            (std::vector<int>{0, 2, 4, 1, 3, 5}));
}

TEST_F(ProcessorsTest, OnlyWhatTheProcessMayUse) {
  AddServer();
  EXPECT_EQ(Ids(Order({4, 5, 6})), (std::vector<int>{4, 5, 6}));
  EXPECT_EQ(Ids(Order({2, 4, 6, 0})), (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(Ids(Order({})), std::vector<int>());
}

TEST_F(ProcessorsTest, NodesInTheirOrderWhateverTheirIds) {
  AddCore("0", {0}, 3);
  AddCore("1", {1}, 0);
  AddCore("2", {2}, 12);
  EXPECT_EQ(Ids(Order({0, 1, 2})), (std::vector<int>{1, 0, 2}));
}

TEST_F(ProcessorsTest, WhatTheSystemDoesNotSay) {
  AddCore("nonsense", {1}, 1);
  EXPECT_EQ(Order({0, 1}),
            (std::vector<Processor>{{0, 0, 0}, {1, 1, 1}}));
}

TEST_F(ProcessorsTest, ModelsShareNoProcessorWhileThereAreOthers) {
  AddServer();
  const std::vector<Processor> order = Order({0, 1, 2, 3, 4, 5, 6, 7});
  auto first = std::make_unique<PinnedProcessors>(3, order);
  EXPECT_EQ(Ids(first->processors()), (std::vector<int>{0, 1, 2}));
  const PinnedProcessors second(4, order);
  EXPECT_EQ(Ids(second.processors()), (std::vector<int>{3, 4, 5, 6}));
  // Only one is left: two are shared, those that come first.
  const auto third = std::make_unique<PinnedProcessors>(3, order);
  EXPECT_EQ(Ids(third->processors()), (std::vector<int>{7, 0, 1}));
  first.reset();
  const PinnedProcessors fourth(3, order);
  EXPECT_EQ(Ids(fourth.processors()), (std::vector<int>{2, 0, 1}));
}

TEST_F(ProcessorsTest, MoreThreadsThanProcessors) {
  AddServer();
  try {
    const PinnedProcessors pinned(3, Order({0, 4}));
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(
        Says(error.what(), {"threads: expected at most 2", "found 3 with "}));
  }
  const PinnedProcessors two(2, Order({0, 4}));  // nothing was taken
  EXPECT_EQ(Ids(two.processors()), (std::vector<int>{0, 4}));
}

// Both would wait for each other on the same processors.
TEST_F(ProcessorsTest, AChildOfForkIsNotPinned) {
  AddServer();
  const PinnedProcessors pinned(2, Order({0, 1}));
  const pid_t child = fork();
  if (child == 0) _exit(pinned.processors().empty() ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(pinned.processors().size(), 2u);
}

TEST(AllowedProcessors, AreThoseOfTheAffinityMask) {
  const std::vector<int> all = AllowedProcessors();
  ASSERT_FALSE(all.empty());
  std::thread([&] {
    ASSERT_TRUE(RunOn({&all.back(), 1}));
    EXPECT_EQ(AllowedProcessors(), std::vector<int>{all.back()});
    EXPECT_EQ(ThreadPool::AvailableProcessors(), 1u);
  }).join();
  EXPECT_EQ(AllowedProcessors(), all);
}

// The mask itself, whatever holds it.
std::vector<int> Mask() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> ids;
  for (int id = 0; id < CPU_SETSIZE; ++id) {
    if (CPU_ISSET(id, &set)) ids.push_back(id);
  }
  return ids;
}

TEST(ScopedPin, HoldsTheThreadUntilItsEnd) {
  const std::vector<int> all = AllowedProcessors();
  {
    const ScopedPin pin(all.back());
    EXPECT_EQ(Mask(), std::vector<int>{all.back()});
    EXPECT_EQ(AllowedProcessors(), all);  // for what it starts
    {
      const ScopedPin inner(all.front());
      EXPECT_EQ(Mask(), std::vector<int>{all.front()});
      EXPECT_EQ(AllowedProcessors(), all);
    }
    EXPECT_EQ(Mask(), std::vector<int>{all.back()});
    EXPECT_EQ(sched_getcpu(), all.back());
  }
  EXPECT_EQ(Mask(), all);
  EXPECT_TRUE(ProcessorsWithoutPin().empty());
}

TEST(ScopedPin, AProcessorThatIsNotThere) {
  const std::vector<int> all = Mask();
  try {
    const ScopedPin pin(1000);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_TRUE(Says(error.what(), {"pin_threads", "1000"}));
    EXPECT_EQ(error.error_number(), EINVAL);
  }
  EXPECT_EQ(Mask(), all);
  EXPECT_TRUE(ProcessorsWithoutPin().empty());
}

// A thread that a pinned one starts would wait for it on its processor.
TEST(Unpinned, ThreadsOfAPinnedThreadRunWhereItMay) {
  const std::vector<int> all = Mask();
  const ScopedPin pin(all.back());
  std::vector<int> inherited, own;
  std::thread([&] { inherited = Mask(); }).join();
  std::thread(Unpinned([&] { own = Mask(); })).join();
  EXPECT_EQ(inherited, std::vector<int>{all.back()});
  EXPECT_EQ(own, all);
}

TEST(PinnedThreadPool, EachThreadOnItsProcessor) {
  const std::vector<Processor> order =
      PlacementOrder(DescribeProcessors(AllowedProcessors()));
  const PinnedProcessors pinned(order.size(), order);
  ThreadPool pool(order.size(), pinned.processors());
  const std::unique_ptr<ScopedPin> pin = PinTo(pinned.processors());
  std::vector<std::vector<int>> masks(order.size());
  std::atomic<size_t> arrived{0};
  pool.Run(order.size(), [&](size_t, size_t thread) {
    masks[thread] = Mask();
    // Keeps each thread in its task until all are in theirs.
    ++arrived;
    while (arrived < masks.size()) std::this_thread::yield();
  });
  for (size_t thread = 0; thread < masks.size(); ++thread) {
    EXPECT_EQ(masks[thread],
              std::vector<int>{pinned.processors()[thread].id});
  }
}

TEST(PinnedThreadPool, ARefusalIsAnErrorAndLeavesNoThread) {
  const std::vector<Processor> order{{0, 0, 0}, {1000, 1000, 0}};
  EXPECT_THROW(ThreadPool(2, order), IoError);
}

TEST(PinnedThreadPool, OthersThreadsAreNotHeldByThePinOfWhoMadeThem) {
  const std::vector<int> all = Mask();
  const ScopedPin pin(all.back());
  ThreadPool pool(2);
  std::vector<int> masks[2];
  std::atomic<size_t> arrived{0};
  pool.Run(2, [&](size_t, size_t thread) {
    masks[thread] = Mask();
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(masks[0], std::vector<int>{all.back()});
  EXPECT_EQ(masks[1], all);
}

}  // namespace
}  // namespace gkv
