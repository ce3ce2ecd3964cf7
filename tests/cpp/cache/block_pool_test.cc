#include "cache/block_pool.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

TEST(BlockPoolTest, BudgetIsExactAndFailureChangesNothing) {
  const auto pool = BlockPool::Create(300);
  BlockRef a = pool->Acquire(100);
  const BlockRef b = pool->Acquire(200);
  EXPECT_EQ(pool->bytes_in_use(), 300u);
  EXPECT_THROW(pool->Acquire(1), OutOfBlocks);
  EXPECT_EQ(pool->bytes_in_use(), 300u);
  EXPECT_EQ(pool->blocks_in_use(), 2u);
  a = BlockRef();
  EXPECT_EQ(pool->bytes_in_use(), 200u);
  EXPECT_NO_THROW(pool->Acquire(100));
}

TEST(BlockPoolTest, ReferencesAreCounted) {
  const auto pool = BlockPool::Create();
  BlockRef a = pool->Acquire(64);
  EXPECT_FALSE(a.shared());
  {
    const BlockRef copy = a;
    EXPECT_TRUE(a.shared());
    EXPECT_EQ(copy.data(), a.data());
  }
  EXPECT_FALSE(a.shared());
  BlockRef moved = std::move(a);
  EXPECT_FALSE(moved.shared());
  moved = BlockRef();
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

TEST(BlockPoolTest, BlocksMayOutliveEveryOtherOwnerOfThePool) {
  BlockRef block;
  {
    const auto pool = BlockPool::Create();
    block = pool->Acquire(128);
  }
  block.data()[127] = 1;
  block = BlockRef();
}

TEST(BlockPoolTest, PoisonFillsNewAndReusedBlocks) {
  const auto pool = BlockPool::Create();
  pool->set_poison(true);
  for (int round = 0; round < 2; ++round) {
    const BlockRef block = pool->Acquire(256);
    for (size_t i = 0; i < 256; ++i) ASSERT_EQ(block.data()[i], 0xFF);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data()) % 64, 0u);
    block.data()[round] = 0;
  }
}

TEST(BlockPoolTest, InjectedFailureHitsOneAcquire) {
  const auto pool = BlockPool::Create();
  pool->FailAfter(2);
  EXPECT_NO_THROW(pool->Acquire(64));
  EXPECT_THROW(pool->Acquire(64), OutOfBlocks);
  EXPECT_NO_THROW(pool->Acquire(64));
}

TEST(BlockPoolTest, ThreadsShareIt) {
  const auto pool = BlockPool::Create();
  const BlockRef common = pool->Acquire(64);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const BlockRef own = pool->Acquire(64 + 64 * (i % 3));
        const BlockRef copy = common;
        own.data()[0] = static_cast<uint8_t>(i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->blocks_in_use(), 1u);
  EXPECT_EQ(pool->bytes_in_use(), 64u);
}

}  // namespace
}  // namespace gkv
