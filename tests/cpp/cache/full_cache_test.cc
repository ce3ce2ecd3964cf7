#include "cache/full_cache.h"

#include "cache/group_cache_conformance.h"

namespace gkv {
namespace {

INSTANTIATE_TEST_SUITE_P(FullCache, GroupCacheConformance,
                         ::testing::Values(GroupKind{LayerKind::kFull, 0, 16},
                                           GroupKind{LayerKind::kFull, 0, 64}));

class FullCacheTest : public GroupCacheConformance {};
INSTANTIATE_TEST_SUITE_P(FullCache, FullCacheTest,
                         ::testing::Values(GroupKind{LayerKind::kFull, 0, 16}));

TEST_P(FullCacheTest, KeepsEverythingAndGoesOnFromAnywhere) {
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

TEST_P(FullCacheTest, AReplayReadsAndDoesNotWrite) {
  const std::vector<int> tokens = SomeTokens(100);
  const auto group = Make();
  Compute(*group, 0, 100, tokens);
  const GroupStep step = group->Prepare(20, 100);
  EXPECT_EQ(step.write_begin, 100u);
  EXPECT_TRUE(step.fresh.empty());
}

TEST_P(FullCacheTest, RewindingReturnsBlocks) {
  const auto group = Make();
  Compute(*group, 0, 100, SomeTokens(100));
  group->Rewind(33);
  EXPECT_EQ(pool_->blocks_in_use(), 3u);
  group->Rewind(32);
  EXPECT_EQ(pool_->blocks_in_use(), 2u);
}

}  // namespace
}  // namespace gkv
