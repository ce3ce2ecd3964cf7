// Content as a value: what groups export and adopt, and whose memory it is.

#include "cache/kv_content.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "cache/conversation.h"
#include "cache/filled_cache.h"

namespace gkv {
namespace {

constexpr size_t kAll = std::numeric_limits<size_t>::max();

void Extend(Conversation& cache, size_t length) {
  std::vector<int32_t> tokens(length - cache.length());
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(cache.length()));
  cache.Append(cache.Lock(), tokens);
  Fill(cache, length);
}

std::unique_ptr<Conversation> EmptyLike(
    const Conversation& cache, std::shared_ptr<BlockPool> pool = nullptr) {
  auto empty = std::make_unique<Conversation>(
      cache.layout_ptr(),
      CacheOptions{.capacity_tokens = cache.capacity_tokens(),
                   .checkpoint_bytes = cache.checkpoint_bytes(),
                   .pool = std::move(pool)},
      cache.model_type());
  return empty;
}

TEST(KvContentTest, WhatOneExportsAnotherAdopts) {
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  const std::vector<uint8_t> bytes = cache->ToBytes(true);
  const auto other = EmptyLike(*cache);
  Extend(*other, 20);
  other->Adopt(other->Lock(), cache->Export());
  ExpectSame(*cache, *other);
  EXPECT_EQ(other->ToBytes(true), bytes);
  EXPECT_EQ(cache->nbytes(), 0u) << "by reference";
  Extend(*other, 90);
  EXPECT_EQ(cache->ToBytes(true), bytes);
  Extend(*cache, 90);
  ExpectSame(*cache, *other);
}

// As from the blocks of a prefix that somebody kept.
TEST(KvContentTest, GroupsAdoptWhatOthersExportUpToAPosition) {
  const auto pool = BlockPool::Create();
  const auto cache = FilledHybrid(KvDtype::kF32, 16);
  ASSERT_EQ(cache->Truncate(37).replay_tokens, 0u);
  const KvContent from = cache->Export();
  KvContent content(cache->layout_ptr(), pool);
  content.computed = from.computed;
  content.fingerprint = from.fingerprint;
  std::vector<int32_t> tokens = cache->tokens();
  content.log.Append(tokens);
  for (size_t g = 0; g < content.groups.size(); ++g) {
    content.groups[g]->Adopt(from.groups[g]->Export(from.computed));
    EXPECT_EQ(content.groups[g]->Held(), from.groups[g]->Held());
  }
  const auto other = EmptyLike(*cache, pool);
  other->Adopt(other->Lock(), std::move(content));
  ExpectSame(*cache, *other);
  for (Conversation* both : {cache.get(), other.get()}) Extend(*both, 90);
  ExpectSame(*cache, *other);
}

TEST(KvContentTest, SealedBlocksTellWhatOfEachGroupCounts) {
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  // Groups: recurrent, sliding with a window of 12, full. 59 are computed.
  cache->Truncate(cache->Lock(), 48);
  Extend(*cache, 59);
  const std::vector<SealedBlock> sealed = cache->SealedBlocks();
  ASSERT_EQ(sealed.size(), 3u);
  const auto [begin, end] = cache->HeldRange(1);
  ASSERT_EQ(end, 59u);
  ASSERT_GE(begin, 32u);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(sealed[i].held.size(), 3u);
    EXPECT_EQ(sealed[i].begin, 16 * i);
    const HeldBlock& full = sealed[i].held[2];
    EXPECT_EQ(full.begin, 16 * i);
    EXPECT_EQ(full.end, 16 * (i + 1));
    EXPECT_EQ(full.block.size_bytes(), cache->layout().groups()[2].block_bytes);
    EXPECT_FALSE(sealed[i].held[0].block) << "no state at a block's end";
    const HeldBlock& sliding = sealed[i].held[1];
    EXPECT_EQ(static_cast<bool>(sliding.block), i == 2);
    if (i == 2) {
      EXPECT_EQ(sliding.begin, begin);
      EXPECT_EQ(sliding.end, 48u);
    }
  }
  const std::vector<SealedBlock> rest = cache->SealedBlocks(17);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].page->hash, sealed[2].page->hash);
  EXPECT_TRUE(cache->SealedBlocks(1000).empty());
  // The state behind a block's last position.
  cache->Append(cache->Lock(), std::vector<int32_t>(5, 1));
  Fill(*cache, 64);
  const SealedBlock last = cache->SealedBlocks(48).at(0);
  EXPECT_EQ(last.held[0].begin, 64u);
  EXPECT_EQ(last.held[0].end, 64u);
  EXPECT_EQ(last.held[0].block.size_bytes(), cache->layout().state_bytes());
}

// Blocks in pages that fault when they are written.
class ReadOnlyPages final : public BlockOwner {
 public:
  explicit ReadOnlyPages(size_t* blocks) : blocks_(blocks) {}

  static BlockRef Copy(const BlockRef& from,
                       const std::shared_ptr<ReadOnlyPages>& owner) {
    auto* const block = new Block;
    block->size_bytes = from.size_bytes();
    block->data = static_cast<uint8_t*>(
        mmap(nullptr, block->size_bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(block->data, MAP_FAILED);
    std::memcpy(block->data, from.data(), block->size_bytes);
    EXPECT_EQ(mprotect(block->data, block->size_bytes, PROT_READ), 0);
    block->mapped = true;
    block->owner = owner;
    ++*owner->blocks_;
    return BlockRef(block);
  }
  void Release(Block* block) noexcept override {
    munmap(block->data, block->size_bytes);
    delete block;
    --*blocks_;
  }

 private:
  size_t* blocks_;
};

TEST(KvContentTest, MappedBlocksAreReadAndCopiedBeforeTheyAreWritten) {
  size_t mapped = 0;
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  const auto pool = BlockPool::Create();
  const auto other = EmptyLike(*cache, pool);
  {
    const auto owner = std::make_shared<ReadOnlyPages>(&mapped);
    const KvContent from = cache->Export();
    KvContent content(cache->layout_ptr(), pool);
    content.computed = from.computed;
    content.fingerprint = from.fingerprint;
    content.log = from.log;
    for (size_t g = 0; g < content.groups.size(); ++g) {
      std::vector<HeldBlock> held = from.groups[g]->Export(kAll);
      for (HeldBlock& part : held) {
        part.block = ReadOnlyPages::Copy(part.block, owner);
      }
      content.groups[g]->Adopt(std::move(held));
    }
    other->Adopt(other->Lock(), std::move(content));
  }
  ExpectSame(*cache, *other);
  EXPECT_EQ(other->nbytes(), 0u);
  EXPECT_EQ(other->shared_nbytes(), 0u);
  size_t held = 0;
  for (size_t layer = 0; layer < cache->layout().layers().size(); ++layer) {
    held += cache->LayerBytes(layer);
  }
  EXPECT_GE(other->mapped_nbytes(), held);  // and what pads states
  EXPECT_GT(mapped, 4u);
  const size_t before = mapped;
  for (Conversation* both : {cache.get(), other.get()}) Extend(*both, 90);
  ExpectSame(*cache, *other);
  EXPECT_LT(mapped, before) << "blocks that were written or forgotten";
  EXPECT_EQ(other->nbytes(), pool->bytes_in_use());
  const auto fork = other->Fork();
  EXPECT_EQ(fork->mapped_nbytes(), other->mapped_nbytes());
  fork->Reset();
  other->Reset();
  EXPECT_EQ(mapped, 0u);
}

}  // namespace
}  // namespace gkv
