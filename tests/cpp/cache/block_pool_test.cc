#include "cache/block_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/failing_new.h"

namespace gkv {
namespace {

TEST(BlockPoolTest, BudgetIsExactAndFailureChangesNothing) {
  const auto pool = BlockPool::Create(300);
  BlockRef a = pool->Acquire(100);
  const BlockRef b = pool->Acquire(200);
  EXPECT_EQ(pool->bytes_in_use(), 300u);
  EXPECT_THROW(pool->Acquire(1), CacheFull);
  EXPECT_EQ(pool->bytes_in_use(), 300u);
  EXPECT_EQ(pool->blocks_in_use(), 2u);
  a = BlockRef();
  EXPECT_EQ(pool->bytes_in_use(), 200u);
  EXPECT_NO_THROW(pool->Acquire(100));
}

TEST(BlockPoolTest, ReferencesAreCounted) {
  const auto pool = BlockPool::Create();
  BlockRef a = pool->Acquire(64);
  EXPECT_TRUE(a.writable());
  {
    const BlockRef copy = a;
    EXPECT_FALSE(a.writable());
    EXPECT_EQ(copy.data(), a.data());
  }
  EXPECT_TRUE(a.writable());
  BlockRef moved = std::move(a);
  EXPECT_TRUE(moved.writable());
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
  EXPECT_THROW(pool->Acquire(64), CacheFull);
  EXPECT_NO_THROW(pool->Acquire(64));
}

// Release ended the process where its list of free blocks could not grow.
TEST(BlockPoolTest, WithoutMemoryNothingIsLostOrMiscounted) {
  const auto pool = BlockPool::Create();
  size_t failures = 0;
  for (size_t n = 1; n < 10; ++n) {
    BlockRef first = pool->Acquire(64 * n);
    BlockRef second;
    {
      const FailingNew failing(n);
      try {
        second = pool->Acquire(640 + 64 * n);
      } catch (const std::exception&) {  // there may be none for a message
        ++failures;
      }
    }
    EXPECT_EQ(pool->blocks_in_use(), second ? 2u : 1u);
    {
      const FailingNew failing(1);
      first = BlockRef();
    }
    EXPECT_EQ(pool->blocks_in_use(), second ? 1u : 0u);
    EXPECT_EQ(pool->bytes_in_use(), second ? 640 + 64 * n : 0u);
  }
  EXPECT_GT(failures, 0u);
}

// Blocks of somebody else, in memory that must not be written.
class Mapping final : public BlockOwner {
 public:
  explicit Mapping(int* released) : released_(released) {}
  void Release(Block* block) noexcept override {
    delete block;
    ++*released_;
  }

 private:
  int* released_;
};

TEST(BlockPoolTest, ABlockGoesBackToItsOwner) {
  alignas(64) static uint8_t bytes[64] = {};
  int released = 0;
  auto* const block = new Block;
  block->data = bytes;
  block->size_bytes = sizeof(bytes);
  block->mapped = true;
  block->owner = std::make_shared<Mapping>(&released);
  BlockRef ref(block);
  EXPECT_FALSE(ref.writable());
  { const BlockRef copy = ref; }
  EXPECT_EQ(released, 0);
  ref = BlockRef();
  EXPECT_EQ(released, 1);
}

class Hoard : public Reclaimer {
 public:
  size_t Reclaim(size_t bytes) override {
    ++asked;
    size_t freed = 0;
    while (freed < bytes && !blocks.empty()) {
      freed += blocks.back().size_bytes();
      blocks.pop_back();
    }
    return freed;
  }

  std::vector<BlockRef> blocks;
  std::atomic<int> asked = 0;
};

TEST(BlockPoolTest, ReclaimersAreAskedBeforeItFails) {
  const auto pool = BlockPool::Create(1000);
  const auto first = std::make_shared<Hoard>();
  const auto second = std::make_shared<Hoard>();
  pool->AddReclaimer(first);
  pool->AddReclaimer(second);
  for (int i = 0; i < 3; ++i) {
    first->blocks.push_back(pool->Acquire(100));
    second->blocks.push_back(pool->Acquire(100));
  }
  const BlockRef a = pool->Acquire(400);
  EXPECT_EQ(first->asked, 0);
  const BlockRef b = pool->Acquire(150);
  EXPECT_EQ(first->blocks.size(), 1u) << "no more than needed";
  EXPECT_EQ(second->asked, 0);
  const BlockRef c = pool->Acquire(300);
  EXPECT_TRUE(first->blocks.empty());
  EXPECT_EQ(second->blocks.size(), 1u);
  // More than the pool may ever hold is not asked for.
  EXPECT_THROW(pool->Acquire(1001), CacheFull);
  EXPECT_EQ(second->blocks.size(), 1u);
  EXPECT_THROW(pool->Acquire(300), CacheFull);
  EXPECT_TRUE(second->blocks.empty());
  EXPECT_EQ(pool->bytes_in_use(), 850u);
  EXPECT_NO_THROW(pool->Acquire(150));
}

struct Miser : Hoard {
  bool gives_way_readily() const override { return false; }
};

TEST(BlockPoolTest, WhatCanBeLeftOutTakesWhatIsGivenReadily) {
  const auto pool = BlockPool::Create(1000);
  const auto miser = std::make_shared<Miser>();
  const auto hoard = std::make_shared<Hoard>();
  pool->AddReclaimer(miser);
  pool->AddReclaimer(hoard);
  miser->blocks.push_back(pool->Acquire(600));
  hoard->blocks.push_back(pool->Acquire(400));
  {
    const OptionalWork work;
    const BlockRef a = pool->Acquire(400);
    EXPECT_EQ(miser->asked, 0);
    EXPECT_EQ(hoard->asked, 1);
    {
      const OptionalWork within;
      EXPECT_THROW(pool->Acquire(100), CacheFull);
    }
    EXPECT_THROW(pool->Acquire(100), CacheFull);
    EXPECT_EQ(miser->asked, 0);
    // It says so for its own thread.
    std::thread other([&] { EXPECT_NO_THROW(pool->Acquire(100)); });
    other.join();
    EXPECT_EQ(miser->asked, 1);
  }
  miser->blocks.push_back(pool->Acquire(1000));
  EXPECT_NO_THROW(pool->Acquire(100));
  EXPECT_EQ(miser->asked, 2);
}

TEST(BlockPoolTest, ReclaimersAreAskedWhereTheSystemHasNoMemory) {
  const auto pool = BlockPool::Create();
  const auto hoard = std::make_shared<Hoard>();
  pool->AddReclaimer(hoard);
  hoard->blocks.push_back(pool->Acquire(128));
  BlockRef block;
  {
    const FailingNew failing(1, 2);  // at once, and with what was kept given up
    block = pool->Acquire(64);
  }
  EXPECT_TRUE(hoard->blocks.empty());
  EXPECT_EQ(pool->bytes_in_use(), 64u);
}

TEST(BlockPoolTest, ReclaimersThatFreeNothingEndInAnError) {
  class Liar final : public Reclaimer {
    size_t Reclaim(size_t) override { return 1; }
  };
  const auto pool = BlockPool::Create(100);
  const BlockRef all = pool->Acquire(100);
  const auto nothing = std::make_shared<Hoard>();
  pool->AddReclaimer(nothing);
  EXPECT_THROW(pool->Acquire(10), CacheFull);
  EXPECT_EQ(nothing->asked, 1);
  const auto liar = std::make_shared<Liar>();
  pool->AddReclaimer(liar);
  EXPECT_THROW(pool->Acquire(10), CacheFull);
}

TEST(BlockPoolTest, ReclaimersMayGoAway) {
  const auto pool = BlockPool::Create(100);
  const BlockRef all = pool->Acquire(100);
  for (int i = 0; i < 1000; ++i) {
    const auto gone = std::make_shared<Hoard>();
    pool->AddReclaimer(gone);
  }
  EXPECT_THROW(pool->Acquire(10), CacheFull);
}

// There is a block for each thread: none may fail because the other one was
// asking when it wanted to.
TEST(BlockPoolTest, ThreadsThatReclaimAtOnceAllGetTheirs) {
  constexpr size_t kThreads = 4, kRounds = 300;
  const auto pool = BlockPool::Create(kThreads * 64);
  for (size_t round = 0; round < kRounds; ++round) {
    std::vector<std::shared_ptr<Hoard>> hoards(kThreads);
    for (auto& hoard : hoards) {
      hoard = std::make_shared<Hoard>();
      hoard->blocks.push_back(pool->Acquire(64));
      pool->AddReclaimer(hoard);
    }
    std::vector<BlockRef> got(kThreads);
    std::vector<std::thread> threads;
    for (BlockRef& block : got) {
      threads.emplace_back(
          [&] { ASSERT_NO_THROW(block = pool->Acquire(64)); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool->blocks_in_use(), kThreads);
  }
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
