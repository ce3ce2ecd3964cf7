#include "cache/attention_cache.h"

#include "cache/group_cache_conformance.h"

namespace gkv {
namespace {

constexpr GroupKind kFull16{LayerKind::kFull, 0, 16};
constexpr GroupKind kFull64{LayerKind::kFull, 0, 64};

GroupKind Sliding(size_t window, size_t block_tokens) {
  return {LayerKind::kSliding, window, block_tokens};
}

INSTANTIATE_TEST_SUITE_P(AttentionCache, GroupCacheConformance,
                         ::testing::Values(kFull16, kFull64, Sliding(1, 16),
                                           Sliding(20, 16), Sliding(33, 64),
                                           Sliding(500, 32)));

class FullLayersTest : public GroupCacheConformance {};
INSTANTIATE_TEST_SUITE_P(AttentionCache, FullLayersTest,
                         ::testing::Values(kFull16));
class SlidingLayersTest : public GroupCacheConformance {};
INSTANTIATE_TEST_SUITE_P(AttentionCache, SlidingLayersTest,
                         ::testing::Values(Sliding(20, 16)));

TEST_P(FullLayersTest, KeepsEverythingAndGoesOnFromAnywhere) {
  const std::vector<int> tokens = SomeTokens(100);
  const auto group = Make();
  Compute(*group, 0, 100, tokens);
  EXPECT_FALSE(group->forgets());
  EXPECT_EQ(group->Held(), (std::pair<size_t, size_t>{0, 100}));
  for (size_t p = 0; p <= 100; ++p) {
    EXPECT_EQ(group->ResumeAt(p, p), p);
    EXPECT_EQ(group->ColdStart(p), p);
  }
}

TEST_P(FullLayersTest, AReplayReadsAndDoesNotWrite) {
  const std::vector<int> tokens = SomeTokens(100);
  const auto group = Make();
  Compute(*group, 0, 100, tokens);
  const GroupStep step = group->Prepare(20, 100);
  EXPECT_EQ(step.write_begin, 100u);
  EXPECT_TRUE(step.fresh.empty());
}

TEST_P(FullLayersTest, RewindingReturnsBlocks) {
  const auto group = Make();
  Compute(*group, 0, 100, SomeTokens(100));
  group->Rewind(33);
  EXPECT_EQ(pool_->blocks_in_use(), 3u);
  group->Rewind(32);
  EXPECT_EQ(pool_->blocks_in_use(), 2u);
}

// What a request goes back to stays as it was, and takes no copy.
TEST_P(FullLayersTest, GoesOnBesideWhatItMayGoBackTo) {
  const std::vector<int> tokens = SomeTokens(30);
  const std::vector<int> start(tokens.begin(), tokens.begin() + 20);
  const auto group = Make();
  Compute(*group, 0, 20, tokens);
  const auto before = group->Share();
  EXPECT_EQ(group->Prepare(20, 25).fresh.size(), 1u);
  for (const size_t begin : {20u, 25u}) {
    GroupStep step = group->Prepare(begin, begin + 5, {}, before.get());
    EXPECT_TRUE(step.fresh.empty());
    Run(step, begin, begin + 5, tokens);
    group->Commit(step, begin, begin + 5);
  }
  ASSERT_NO_FATAL_FAILURE(Check(*group, tokens));
  ASSERT_NO_FATAL_FAILURE(Check(*before, start));
  // Who holds more counts, and so does everybody else.
  EXPECT_EQ(before->Prepare(20, 21, {}, group.get()).fresh.size(), 1u);
  const auto other = group->Share();
  EXPECT_EQ(group->Prepare(30, 31, {}, before.get()).fresh.size(), 1u);
}

TEST_P(SlidingLayersTest, Checklist02_APrefillPastTheWindowKeepsTheWindow) {
  const std::vector<int> tokens = SomeTokens(150);
  const auto group = Make();
  Compute(*group, 0, 150, tokens);
  // The window of the last position, in whole blocks.
  EXPECT_EQ(group->Held(), (std::pair<size_t, size_t>{128, 150}));
  EXPECT_EQ(pool_->blocks_in_use(), 2u);
  ASSERT_NO_FATAL_FAILURE(Check(*group, tokens));
}

TEST_P(SlidingLayersTest, BlocksAreDroppedAndNeverOverwritten) {
  const std::vector<int> tokens = SomeTokens(150);
  const auto group = Make();
  Compute(*group, 0, 60, tokens);
  const auto old = group->Share();  // as a checkpoint does
  Compute(*group, 60, 150, tokens);
  ASSERT_NO_FATAL_FAILURE(Check(*old, {tokens.begin(), tokens.begin() + 61}));
  EXPECT_EQ(old->ResumeAt(60, 60), 60u);
}

TEST_P(SlidingLayersTest, SaysWhatItCannotGoOnFrom) {
  const auto group = Make();
  Compute(*group, 0, 150, SomeTokens(150));
  EXPECT_EQ(group->ResumeAt(149, 149), 149u);
  EXPECT_EQ(group->ResumeAt(147, 147), 147u);  // still in the same block
  EXPECT_EQ(group->ResumeAt(146, 146), std::nullopt);
  EXPECT_EQ(group->ResumeAt(0, 0), std::nullopt);
  EXPECT_EQ(group->ColdStart(100), 100u - 2 * 19) << "two layers, window 20";
  EXPECT_EQ(group->ColdStart(38), 0u);
}

TEST_P(SlidingLayersTest, AWarmUpCountsFromItsTargetOn) {
  const std::vector<int> tokens = SomeTokens(150);
  const auto group = Make();
  group->Restart(62, 100);
  EXPECT_EQ(group->ResumeAt(100, 100), 62u);
  GroupStep first = group->Prepare(62, 90);
  EXPECT_EQ(first.readable_begin, 62u);
  EXPECT_EQ(first.write_begin, 62u);
  group->Commit(first, 62, 90);
  EXPECT_EQ(group->Held(), (std::pair<size_t, size_t>{0, 0}));
  EXPECT_EQ(group->ResumeAt(100, 100), 90u);
  EXPECT_EQ(group->ResumeAt(99, 99), std::nullopt) << "another target";
  GroupStep second = group->Prepare(90, 110);
  group->Commit(second, 90, 110);
  EXPECT_EQ(group->Held(), (std::pair<size_t, size_t>{81, 110}));
}

}  // namespace
}  // namespace gkv
