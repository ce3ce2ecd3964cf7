// Conversations that share a pool too small for them and their checkpoints.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cache/conversation.h"
#include "cache/filled_cache.h"

namespace gkv {
namespace {

constexpr size_t kLength = 400;

std::shared_ptr<const KvLayout> Layout() {
  static const auto layout = FilledLayout(KvDtype::kBF16, 16);
  return layout;
}

std::unique_ptr<Conversation> Empty(const std::shared_ptr<BlockPool>& pool) {
  return std::make_unique<Conversation>(
      Layout(),
      CacheOptions{.capacity_tokens = 4000,
                   .checkpoint_bytes = size_t{1} << 30,
                   .pool = pool},
      "");
}

void Extend(Conversation& cache, size_t length) {
  std::vector<int32_t> tokens(length - cache.length());
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(cache.length()));
  cache.Append(cache.Lock(), tokens);
  Fill(cache, length);
}

// 400 tokens, a checkpoint at every 50.
std::unique_ptr<Conversation> WithCheckpoints(
    const std::shared_ptr<BlockPool>& pool) {
  auto cache = Empty(pool);
  for (size_t length = 50; length <= kLength; length += 50) {
    Extend(*cache, length);
    EXPECT_TRUE(cache->MakeCheckpoint());
  }
  return cache;
}

size_t BytesWithoutCheckpoints() {
  const auto pool = BlockPool::Create();
  const auto cache = Empty(pool);
  Extend(*cache, kLength);
  return pool->bytes_in_use();
}

size_t BytesWithCheckpoints() {
  const auto pool = BlockPool::Create();
  const auto cache = WithCheckpoints(pool);
  return pool->bytes_in_use();
}

// Whatever was given up: going back to anywhere and on from there holds what a
// conversation of its own holds.
void ExpectExact(const Conversation& cache) {
  const auto unlimited = BlockPool::Create();
  for (const size_t length : {400, 350, 333, 100, 50, 7}) {
    const auto fork = Conversation::FromBytes(
        cache.ToBytes(true), {.block_tokens = 16, .pool = unlimited});
    const auto expected = Empty(unlimited);
    Extend(*expected, 420);
    fork->Truncate(length);
    Extend(*fork, 420);
    EXPECT_EQ(fork->tokens(), expected->tokens());
    for (size_t layer = 0; layer < 2; ++layer) {
      const auto [begin, end] = expected->HeldRange(layer);
      const auto held = fork->HeldRange(layer);
      ASSERT_EQ(held.second, end);
      const std::vector<float> left = expected->CopyLayer(layer, false);
      const std::vector<float> right = fork->CopyLayer(layer, false);
      const size_t rows = std::min(end - begin, end - held.first);
      ASSERT_GE(rows, layer == 0 ? 20u : 420u);
      const size_t floats = rows * (left.size() / (end - begin));
      EXPECT_EQ(std::vector<float>(left.end() - static_cast<long>(floats),
                                   left.end()),
                std::vector<float>(right.end() - static_cast<long>(floats),
                                   right.end()))
          << length;
    }
  }
}

TEST(ReclaimTest, IdleConversationsGiveUpCheckpoints) {
  const size_t plain = BytesWithoutCheckpoints();
  const size_t marked = BytesWithCheckpoints();
  ASSERT_GT(marked, plain);
  // Room for both without checkpoints, and for a part of them.
  const auto pool = BlockPool::Create(marked + plain + (marked - plain) / 2);
  const auto idle = WithCheckpoints(pool);
  const auto working = WithCheckpoints(pool);
  EXPECT_EQ(working->CheckpointLengths().size(), 8u);
  EXPECT_LT(idle->CheckpointLengths().size(), 8u);
  EXPECT_GT(idle->CheckpointLengths().size(), 0u) << "more than needed went";
  ExpectExact(*idle);
  ExpectExact(*working);
}

TEST(ReclaimTest, ARunningConversationKeepsItsCheckpoints) {
  const auto pool = BlockPool::Create(BytesWithCheckpoints() +
                                      BytesWithoutCheckpoints() / 2);
  const auto running = WithCheckpoints(pool);
  const RunLock lock = running->Lock();
  const auto other = Empty(pool);
  EXPECT_THROW(Extend(*other, kLength), CacheFull);
  EXPECT_EQ(running->CheckpointLengths().size(), 8u);
}

// Its own state is locked while it acquires.
TEST(ReclaimTest, AConversationDoesNotAskItself) {
  const auto pool = BlockPool::Create(BytesWithCheckpoints() +
                                      BytesWithoutCheckpoints() / 4);
  const auto cache = WithCheckpoints(pool);
  EXPECT_THROW(Extend(*cache, 2 * kLength), CacheFull);
  EXPECT_EQ(cache->CheckpointLengths().size(), 8u);
}

TEST(ReclaimTest, APoolAsksItsOwnConversationsOnly) {
  const auto pool = BlockPool::Create(BytesWithoutCheckpoints() / 2);
  const auto elsewhere = WithCheckpoints(BlockPool::Create());
  const auto cache = Empty(pool);
  EXPECT_THROW(Extend(*cache, kLength), CacheFull);
  EXPECT_EQ(elsewhere->CheckpointLengths().size(), 8u);
}

TEST(ReclaimTest, WhatAForkCarriesStays) {
  const auto pool = BlockPool::Create(BytesWithCheckpoints() +
                                      BytesWithoutCheckpoints() / 2);
  const auto cache = WithCheckpoints(pool);
  const auto fork = cache->Fork();
  const auto other = Empty(pool);
  EXPECT_THROW(Extend(*other, kLength), CacheFull);
  EXPECT_EQ(cache->CheckpointLengths().size(), 8u);
}

// Conversations come, work, rest and go on several threads; whoever runs
// reclaims from those that rest.
TEST(ReclaimTest, ThreadsReclaimFromEachOther) {
  const size_t plain = BytesWithoutCheckpoints();
  const size_t marked = BytesWithCheckpoints();
  // Enough for all to work at once, not for all checkpoints.
  const auto pool = BlockPool::Create(3 * marked + 3 * plain);
  std::vector<std::unique_ptr<Conversation>> resting(3);
  for (auto& cache : resting) cache = WithCheckpoints(pool);
  std::atomic<size_t> full = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 8; ++round) {
        auto& mine = resting[static_cast<size_t>(t)];
        auto next = Empty(pool);
        try {
          Extend(*next, kLength - 100);
          next->MakeCheckpoint();
          Extend(*next, kLength);
        } catch (const CacheFull&) {
          ++full;
        }
        mine = std::move(next);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(full, 0u);
  resting.clear();
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

}  // namespace
}  // namespace gkv
