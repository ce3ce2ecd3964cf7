#include "cache/checkpoints.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cache/attention_cache.h"
#include "cache/recurrent_cache.h"

namespace gkv {
namespace {

// Checkpoints of a recurrent layer have one block each; those of a sliding
// layer share what they have in common.
class CheckpointListTest : public ::testing::Test {
 protected:
  static constexpr size_t kWindow = 32;

  CheckpointListTest() {
    recurrent_ = std::make_shared<KvLayout>(
        std::vector<KvLayerSpec>{
            {.kind = LayerKind::kRecurrent, .lru_width = 16, .conv_tail = 3}},
        KvDtype::kF32, 16);
    sliding_ = std::make_shared<KvLayout>(
        std::vector<KvLayerSpec>{{LayerKind::kSliding, 1, 32, kWindow}},
        KvDtype::kF32, 16);
  }

  // One state, which nothing else refers to.
  Checkpoint Alone(size_t position) const {
    GroupSet groups = MakeGroups(recurrent_, pool_);
    GroupCache& group = *groups[0];
    GroupStep step = group.Prepare(0, position);
    group.Commit(step, 0, position);
    return {position, position,
            std::make_shared<const GroupSet>(std::move(groups))};
  }

  static std::vector<size_t> Positions(const CheckpointList& list) {
    std::vector<size_t> positions;
    for (const Checkpoint& c : list.list()) positions.push_back(c.position);
    return positions;
  }

  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<const KvLayout> recurrent_;
  std::shared_ptr<const KvLayout> sliding_;
};

TEST_F(CheckpointListTest, FindsTheNearestAndTheOneOfALength) {
  CheckpointList list;
  EXPECT_EQ(list.AtOrBefore(100), nullptr);
  for (const size_t position : {10, 20, 30}) {
    Checkpoint checkpoint = Alone(position);
    checkpoint.length = position + 1;
    EXPECT_TRUE(list.Add(std::move(checkpoint), SIZE_MAX));
  }
  EXPECT_EQ(list.AtOrBefore(9), nullptr);
  EXPECT_EQ(list.AtOrBefore(10)->position, 10u);
  EXPECT_EQ(list.AtOrBefore(29)->position, 20u);
  EXPECT_EQ(list.AtOrBefore(99)->position, 30u);
  EXPECT_EQ(list.OfLength(21)->position, 20u);
  EXPECT_EQ(list.OfLength(20), nullptr);
}

TEST_F(CheckpointListTest, TruncatingDropsWhatLiesBehind) {
  CheckpointList list;
  for (const size_t position : {10, 20, 30}) {
    Checkpoint checkpoint = Alone(position);
    checkpoint.length = position + 1;
    list.Add(std::move(checkpoint), SIZE_MAX);
  }
  list.Truncate(20);
  EXPECT_EQ(Positions(list), (std::vector<size_t>{10, 20}));
  // Its pending token is gone.
  EXPECT_EQ(list.OfLength(20)->position, 20u);
  EXPECT_EQ(list.OfLength(11)->position, 10u);
  EXPECT_EQ(pool_->blocks_in_use(), 2u);
}

TEST_F(CheckpointListTest, LengthsStayAscending) {
  CheckpointList list;
  Checkpoint first = Alone(10), second = Alone(20);
  first.length = 40;  // with many tokens pending
  second.length = 60;
  list.Add(std::move(first), SIZE_MAX);
  list.Add(std::move(second), SIZE_MAX);
  list.Truncate(50);
  EXPECT_EQ(list.OfLength(20)->position, 20u);
  EXPECT_EQ(list.OfLength(10)->position, 10u);
}

TEST_F(CheckpointListTest, TheSamePositionIsReplaced) {
  CheckpointList list;
  list.Add(Alone(10), SIZE_MAX);
  list.Add(Alone(20), SIZE_MAX);
  Checkpoint again = Alone(20);
  again.length = 25;
  EXPECT_TRUE(list.Add(std::move(again), SIZE_MAX));
  EXPECT_EQ(Positions(list), (std::vector<size_t>{10, 20}));
  EXPECT_EQ(list.OfLength(25)->position, 20u);
}

// Those of points inside a step come in any order.
TEST_F(CheckpointListTest, OneInBetweenTakesItsPlace) {
  CheckpointList list;
  Checkpoint first = Alone(10);
  first.length = 25;  // with tokens pending
  list.Add(std::move(first), SIZE_MAX);
  list.Add(Alone(30), SIZE_MAX);
  EXPECT_TRUE(list.Add(Alone(20), SIZE_MAX));
  EXPECT_TRUE(list.Add(Alone(5), SIZE_MAX));
  EXPECT_EQ(Positions(list), (std::vector<size_t>{5, 10, 20, 30}));
  EXPECT_EQ(list.AtOrBefore(20)->length, 25u) << "lengths stay ascending";
  EXPECT_EQ(list.OfLength(25)->position, 20u);
  // The new one may be the one whose loss opens the smallest gap.
  EXPECT_FALSE(list.Add(Alone(6), 4 * recurrent_->checkpoint_bytes()));
  EXPECT_EQ(Positions(list), (std::vector<size_t>{5, 10, 20, 30}));
}

TEST_F(CheckpointListTest, OldOnesThinOutAndTheFirstAndTheLastStay) {
  const size_t one = recurrent_->checkpoint_bytes();
  CheckpointList list;
  for (size_t position = 10; position <= 1000; position += 10) {
    EXPECT_TRUE(list.Add(Alone(position), 6 * one));
    EXPECT_LE(list.nbytes(), 6 * one);
    EXPECT_EQ(list.list().front().position, 10u);
    EXPECT_EQ(list.list().back().position, position);
  }
  const std::vector<size_t> kept = Positions(list);
  ASSERT_EQ(kept.size(), 6u);
  EXPECT_EQ(pool_->blocks_in_use(), 6u) << "evicted ones are let go of";
  for (size_t i = 2; i < kept.size(); ++i) {
    EXPECT_LE(kept[i] - kept[i - 1], kept[i - 1] - kept[i - 2])
        << "gaps grow with the distance from the end";
  }
}

TEST_F(CheckpointListTest, ABudgetForOneKeepsTheLast) {
  const size_t one = recurrent_->checkpoint_bytes();
  CheckpointList list;
  EXPECT_TRUE(list.Add(Alone(10), one));
  EXPECT_TRUE(list.Add(Alone(20), one));
  EXPECT_EQ(Positions(list), std::vector<size_t>{20});
}

TEST_F(CheckpointListTest, OneThatIsTooLargeChangesNothing) {
  const size_t one = recurrent_->checkpoint_bytes();
  CheckpointList list;
  EXPECT_FALSE(list.Add(Alone(5), one - 1));
  EXPECT_TRUE(list.Add(Alone(10), one));
  EXPECT_FALSE(list.Add(Alone(20), one - 1));
  EXPECT_EQ(Positions(list), std::vector<size_t>{10});
}

TEST_F(CheckpointListTest, GivesUpThoseThatAreMissedLeast) {
  const size_t one = recurrent_->checkpoint_bytes();
  CheckpointList list;
  for (const size_t position : {10, 20, 30, 35}) {
    list.Add(Alone(position), SIZE_MAX);
  }
  size_t freed = 0;
  {
    const auto given_up = list.GiveUp(pool_.get(), one + 1, freed);
    EXPECT_EQ(given_up.size(), 2u);
    EXPECT_EQ(pool_->blocks_in_use(), 4u) << "the caller lets go of them";
  }
  EXPECT_EQ(freed, 2 * one);
  EXPECT_EQ(pool_->blocks_in_use(), 2u);
  EXPECT_EQ(Positions(list), (std::vector<size_t>{10, 35}));
  list.GiveUp(pool_.get(), 1, freed);
  EXPECT_EQ(Positions(list), std::vector<size_t>{35});
  list.GiveUp(pool_.get(), SIZE_MAX, freed);
  EXPECT_EQ(freed, one);
  EXPECT_TRUE(list.empty());
  EXPECT_TRUE(list.GiveUp(pool_.get(), SIZE_MAX, freed).empty());
  EXPECT_EQ(freed, 0u);
}

TEST_F(CheckpointListTest, GivesUpNothingInVain) {
  const size_t one = recurrent_->checkpoint_bytes();
  CheckpointList list;
  for (const size_t position : {10, 20, 30}) {
    list.Add(Alone(position), SIZE_MAX);
  }
  size_t freed = 0;
  const auto other_pool = BlockPool::Create();
  EXPECT_TRUE(list.GiveUp(other_pool.get(), SIZE_MAX, freed).empty());
  EXPECT_EQ(freed, 0u);
  {
    const CheckpointList fork = list;
    EXPECT_TRUE(list.GiveUp(pool_.get(), SIZE_MAX, freed).empty());
    EXPECT_EQ(freed, 0u);
  }
  // One whose state is that of the conversation.
  const auto held = (*list.list()[1].groups)[0]->Share();
  list.GiveUp(pool_.get(), SIZE_MAX, freed);
  EXPECT_EQ(freed, 2 * one);
  EXPECT_EQ(Positions(list), std::vector<size_t>{20});
}

// Blocks that several checkpoints have in common are free with the last one.
TEST_F(CheckpointListTest, GivesUpWhatOnlyCheckpointsShare) {
  GroupSet groups = MakeGroups(sliding_, pool_);
  GroupCache& group = *groups[0];
  CheckpointList list;
  for (size_t at = 0; at < 320; at += 16) {
    GroupStep step = group.Prepare(at, at + 16);
    group.Commit(step, at, at + 16);
    group.Forget(group.RewindFloor());
    list.Add({at + 16, at + 16,
              std::make_shared<const GroupSet>(ShareGroups(groups, true))},
             SIZE_MAX);
  }
  while (true) {
    const size_t before = pool_->bytes_in_use();
    size_t freed = 0;
    list.GiveUp(pool_.get(), 1, freed);
    EXPECT_EQ(pool_->bytes_in_use() + freed, before);
    if (freed == 0) break;
  }
  std::vector<const Block*> blocks;
  group.AddBlocks(blocks);
  EXPECT_EQ(pool_->blocks_in_use(), blocks.size());
}

TEST_F(CheckpointListTest, WhereNothingIsForgottenNoneIsNeeded) {
  CheckpointList list;
  EXPECT_TRUE(list.Add({10, 10, std::make_shared<const GroupSet>(2)}, 0));
  EXPECT_TRUE(list.empty());
}

TEST_F(CheckpointListTest, SharedBlocksCountOnce) {
  GroupSet groups = MakeGroups(sliding_, pool_);
  GroupCache& group = *groups[0];
  CheckpointList list;
  for (size_t at = 0; at < 160; at += 8) {
    GroupStep step = group.Prepare(at, at + 8);
    group.Commit(step, at, at + 8);
    group.Forget(group.RewindFloor());
    ASSERT_TRUE(
        list.Add({at + 8, at + 8,
                  std::make_shared<const GroupSet>(ShareGroups(groups, true))},
                 SIZE_MAX));
  }
  EXPECT_EQ(list.list().size(), 20u);
  // Ten blocks of 16 positions, and each half-full one once more: the half
  // that was held was copied when the other was written.
  EXPECT_EQ(list.nbytes(), 20 * sliding_->groups()[0].block_bytes);
}

}  // namespace
}  // namespace gkv
