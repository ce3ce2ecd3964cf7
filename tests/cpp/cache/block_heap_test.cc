#include "cache/block_heap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "base/failing_new.h"

namespace gkv {
namespace {

constexpr size_t kAll = std::numeric_limits<size_t>::max();

TEST(BlockHeapTest, KeepsFreedBlocksForTheirSize) {
  BlockHeap heap;
  Block* const a = heap.Allocate(100, kAll);
  Block* const b = heap.Allocate(100, kAll);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a->data) % 64, 0u);
  EXPECT_TRUE(heap.Keep(a));
  EXPECT_TRUE(heap.Keep(b));
  Block* const other = heap.Allocate(101, kAll);
  EXPECT_EQ(heap.Allocate(100, kAll), b);
  EXPECT_EQ(heap.Allocate(100, kAll), a);
  EXPECT_EQ(a->refs, 1u);
  EXPECT_EQ(a->next, nullptr);
  for (Block* block : {a, b, other}) BlockHeap::Delete(block);
}

TEST(BlockHeapTest, KeepsABoundedNumber) {
  BlockHeap heap;
  std::vector<Block*> blocks;
  for (int i = 0; i < 20; ++i) {
    blocks.push_back(heap.Allocate(size_t{1} << 20, kAll));
  }
  int kept = 0;
  for (Block* block : blocks) {
    if (heap.Keep(block)) {
      ++kept;
    } else {
      BlockHeap::Delete(block);
    }
  }
  EXPECT_EQ(kept, 16);
}

TEST(BlockHeapTest, KeptOnesMakeRoom) {
  BlockHeap heap;
  std::vector<Block*> blocks = {heap.Allocate(100, kAll),
                                heap.Allocate(200, kAll)};
  for (Block* block : blocks) EXPECT_TRUE(heap.Keep(block));
  BlockHeap::Delete(heap.Allocate(300, 300));
  Block* const again = heap.Allocate(200, 300);
  EXPECT_EQ(again, blocks[1]) << "300 bytes had room";
  EXPECT_TRUE(heap.Keep(again));
  BlockHeap::Delete(heap.Allocate(300, 299));
  // All 300 are gone: nothing is found for reuse.
  const FailingNew failing(1);
  EXPECT_EQ(heap.Allocate(100, kAll), nullptr);
}

TEST(BlockHeapTest, WithoutMemoryThereIsNoBlock) {
  BlockHeap heap;
  size_t failures = 0;
  Block* block = nullptr;
  while (block == nullptr) {
    const FailingNew failing(failures + 1);
    block = heap.Allocate(64, kAll);
    if (block == nullptr) ++failures;
  }
  EXPECT_GT(failures, 0u);
  const FailingNew failing(1);
  EXPECT_TRUE(heap.Keep(block));
}

}  // namespace
}  // namespace gkv
