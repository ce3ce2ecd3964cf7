#include "model/group_tasks.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

namespace gkv {
namespace {

constexpr size_t kFewRows = 63, kManyRows = 64;

std::vector<size_t> Sizes(const GroupTasks& tasks) {
  std::vector<size_t> sizes;
  for (size_t task = 0; task < tasks.count(); ++task) {
    const auto [begin, end] = tasks.RangeOf(task);
    sizes.push_back(end - begin);
  }
  return sizes;
}

TEST(GroupTasksTest, CoverAllGroupsOnce) {
  for (const size_t rows : {size_t{1}, kFewRows, kManyRows, size_t{512}}) {
    for (const size_t threads : {1, 2, 3, 8, 64, 256}) {
      for (const size_t most : {2, 8, 1 << 20}) {
        for (size_t groups = 0; groups < 3000; groups += groups / 7 + 1) {
          const GroupTasks tasks(groups, rows, threads, most);
          size_t next = 0;
          for (size_t task = 0; task < tasks.count(); ++task) {
            const auto [begin, end] = tasks.RangeOf(task);
            ASSERT_EQ(begin, next) << groups << " " << threads;
            ASSERT_LT(begin, end);
            ASSERT_LE(end - begin, std::min(most, tasks.longest()));
            // Kernels take pairs, and activations are quantized in them.
            ASSERT_EQ(begin % 2, 0u);
            next = end;
          }
          ASSERT_EQ(next, groups) << groups << " " << threads;
        }
      }
    }
  }
}

TEST(GroupTasksTest, OfManyRowsHalveRoundByRound) {
  EXPECT_EQ(Sizes(GroupTasks(72, kManyRows, 2)),
            (std::vector<size_t>{18, 18, 10, 10, 4, 4, 2, 2, 2, 2}));
  EXPECT_EQ(Sizes(GroupTasks(40, kManyRows, 4, 4)),
            (std::vector<size_t>{4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2}));
}

// Whoever has the last one keeps the others waiting no longer than for two
// groups, also where all but one thread are held up meanwhile.
TEST(GroupTasksTest, OfManyRowsEndWithShortOnes) {
  for (const size_t threads : {2, 8, 64}) {
    for (const size_t groups : {40, 72, 160, 432, 640, 16384}) {
      const std::vector<size_t> sizes =
          Sizes(GroupTasks(groups, kManyRows, threads));
      EXPECT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
      EXPECT_LE(sizes.back(), 2u);
      EXPECT_LE(sizes.front(), std::max<size_t>(2, groups / (2 * threads) + 2));
    }
  }
}

TEST(GroupTasksTest, OfFewRowsAreAsLong) {
  const std::vector<size_t> sizes = Sizes(GroupTasks(432, kFewRows, 2));
  EXPECT_EQ(sizes.size(), 24u);
  for (size_t task = 0; task + 1 < sizes.size(); ++task) {
    EXPECT_EQ(sizes[task], 18u);
  }
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), size_t{0}), 432u);
  // Fewer than are worth a portion: one for each thread.
  EXPECT_EQ(Sizes(GroupTasks(20, 1, 2)), (std::vector<size_t>{10, 10}));
}

}  // namespace
}  // namespace gkv
