#include "cache/recurrent_cache.h"

#include "cache/group_cache_conformance.h"

namespace gkv {
namespace {

INSTANTIATE_TEST_SUITE_P(RecurrentCache, GroupCacheConformance,
                         ::testing::Values(GroupKind{LayerKind::kRecurrent, 0,
                                                     16}));

class RecurrentCacheTest : public GroupCacheConformance {};
INSTANTIATE_TEST_SUITE_P(RecurrentCache, RecurrentCacheTest,
                         ::testing::Values(GroupKind{LayerKind::kRecurrent, 0,
                                                     16}));

TEST_P(RecurrentCacheTest, Checklist15_TheStateIsZeroAtPositionZero) {
  const auto group = Make();
  for (int round = 0; round < 2; ++round) {
    const GroupStep step = group->Prepare(0, 3);
    for (size_t layer = 0; layer < 2; ++layer) {
      const float* state = reinterpret_cast<const float*>(
          step.blocks[0] + layout_->state_offset(layer));
      for (size_t i = 0; i < (1 + kTail) * kWidth; ++i) {
        EXPECT_EQ(state[i], 0.0f);
      }
    }
    // Also behind a use.
    Compute(*group, 0, 9, SomeTokens(9));
    group->Restart(0, 5);
  }
}

TEST_P(RecurrentCacheTest, GoesBackToTheBeginningOfTheLastStep) {
  const std::vector<int> tokens = SomeTokens(60);
  const auto group = Make();
  Compute(*group, 0, 30, tokens);
  Compute(*group, 30, 50, tokens);
  Compute(*group, 50, 51, tokens);
  EXPECT_EQ(group->RewindFloor(), 50u);
  EXPECT_EQ(group->ResumeAt(60, 60), 51u);
  EXPECT_EQ(group->ResumeAt(50, 50), 50u);
  EXPECT_EQ(group->ResumeAt(49, 49), std::nullopt);
  EXPECT_EQ(group->ColdStart(49), 0u);
  group->Rewind(50);
  EXPECT_EQ(group->Held().second, 50u);
  ASSERT_NO_FATAL_FAILURE(Compute(*group, 50, 60, tokens));
}

TEST_P(RecurrentCacheTest, SizeDoesNotGrow) {
  const std::vector<int> tokens = SomeTokens(200);
  const auto group = Make();
  for (size_t at = 0; at < 200; ++at) {
    Compute(*group, at, at + 1, tokens);
    ASSERT_LE(pool_->blocks_in_use(), 2u);
  }
}

TEST_P(RecurrentCacheTest, ASnapshotOutlivesWhatFollows) {
  const std::vector<int> tokens = SomeTokens(200);
  const auto group = Make();
  Compute(*group, 0, 70, tokens);
  const auto checkpoint = group->Share();
  for (size_t at = 70; at < 200; at += 10) {
    Compute(*group, at, at + 10, tokens);
  }
  EXPECT_EQ(checkpoint->ResumeAt(100, 100), 70u);
  ASSERT_NO_FATAL_FAILURE(Compute(*checkpoint, 70, 100, tokens));
}

}  // namespace
}  // namespace gkv
