#ifndef GEMMAKV_TESTS_CACHE_GROUP_CACHE_CONFORMANCE_H_
#define GEMMAKV_TESTS_CACHE_GROUP_CACHE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/error.h"
#include "cache/group_cache.h"
#include "ops/kv_strip.h"

// What every kind of group cache must do. The test of a kind instantiates it:
//   INSTANTIATE_TEST_SUITE_P(RecurrentCache, GroupCacheConformance,
//                            ::testing::Values(GroupKind{...}));

namespace gkv {

struct GroupKind {
  LayerKind kind;
  size_t window;  // sliding groups
  size_t block_tokens;
};

inline void PrintTo(const GroupKind& kind, std::ostream* out) {
  *out << "kind " << static_cast<int>(kind.kind) << " window " << kind.window
       << " blocks of " << kind.block_tokens;
}

class GroupCacheConformance : public ::testing::TestWithParam<GroupKind> {
 protected:
  static constexpr size_t kHeadDim = 32;
  static constexpr size_t kWidth = 5, kTail = 2;  // recurrent layers

  GroupCacheConformance() {
    pool_->set_poison(true);
    const GroupKind& kind = GetParam();
    KvLayerSpec layer{kind.kind};
    if (kind.kind == LayerKind::kRecurrent) {
      layer.lru_width = kWidth;
      layer.conv_tail = kTail;
    } else {
      layer.kv_heads = 1;
      layer.head_dim = kHeadDim;
      layer.window = kind.window;
    }
    // Two layers, so that a layer's place within a block matters.
    layout_ = std::make_shared<KvLayout>(std::vector{layer, layer},
                                         KvDtype::kF32, kind.block_tokens);
  }

  std::unique_ptr<GroupCache> Make() const {
    return std::move(MakeGroups(layout_, pool_)[0]);
  }

  bool recurrent() const { return GetParam().kind == LayerKind::kRecurrent; }

  // What a position of a layer holds, or a state holds after it. All tokens
  // before it enter a state.
  float Content(const std::vector<int>& tokens, size_t layer,
                size_t position) const {
    if (!recurrent()) {
      return static_cast<float>(tokens[position] * 2) +
             static_cast<float>(layer);
    }
    uint32_t state = 0;
    for (size_t p = 0; p <= position; ++p) {
      state = Next(state, tokens[p], layer);
    }
    return static_cast<float>(state);
  }

  // Does what a model does: first every row's own content is stored, then rows
  // read. Checks whatever a row of the step may read.
  void Run(GroupStep& step, size_t begin, size_t end,
           const std::vector<int>& tokens) const {
    for (size_t layer = 0; layer < 2; ++layer) {
      if (recurrent()) {
        RunState(step, begin, end, tokens, layer);
      } else {
        RunRows(step, begin, end, tokens, layer);
      }
    }
  }

  // A step as the engine does it.
  void Compute(GroupCache& group, size_t begin, size_t end,
               const std::vector<int>& tokens) const {
    GroupStep step = group.Prepare(begin, end);
    Run(step, begin, end, tokens);
    group.Commit(step, begin, end);
    group.Forget(group.RewindFloor());
  }

  // Everything that the group says it can go on from is right: a step from
  // there, dropped afterwards, reads nothing wrong.
  void Check(const GroupCache& group, const std::vector<int>& tokens) const {
    for (size_t target = 0; target < tokens.size(); ++target) {
      const std::optional<size_t> at = group.ResumeAt(target, target);
      if (!at) continue;
      ASSERT_LE(*at, target);
      GroupStep step = group.Prepare(*at, target + 1);
      Run(step, *at, target + 1, tokens);
    }
  }

  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<const KvLayout> layout_;

 private:
  static uint32_t Next(uint32_t state, int token, size_t layer) {
    return (state * 31 + static_cast<uint32_t>(token) * 7 +
            static_cast<uint32_t>(layer)) &
           0xFFFFFF;
  }

  void RunState(GroupStep& step, size_t begin, size_t end,
                const std::vector<int>& tokens, size_t layer) const {
    float* state =
        reinterpret_cast<float*>(step.blocks[0] + layout_->state_offset(layer));
    const float before = begin == 0 ? 0.0f : Content(tokens, layer, begin - 1);
    for (size_t i = 0; i < layout_->state_floats(layer); ++i) {
      ASSERT_EQ(state[i], before) << "the state before position " << begin;
    }
    for (const auto& [position, block] : step.kept) {
      float* kept =
          reinterpret_cast<float*>(block.data() + layout_->state_offset(layer));
      std::fill(kept, kept + layout_->state_floats(layer),
                Content(tokens, layer, position - 1));
    }
    const float after = Content(tokens, layer, end - 1);
    std::fill(state, state + layout_->state_floats(layer), after);
  }

  void RunRows(GroupStep& step, size_t begin, size_t end,
               const std::vector<int>& tokens, size_t layer) const {
    const size_t block_tokens = layout_->block_tokens();
    const auto strip = [&](size_t position, bool value) {
      return step.blocks[position / block_tokens - step.first_block] +
             (value ? layout_->value_offset(layer, 0)
                    : layout_->key_offset(layer, 0));
    };
    for (size_t p = std::max(begin, step.write_begin); p < end; ++p) {
      const std::vector<float> row(kHeadDim, Content(tokens, layer, p));
      StoreKey(KvDtype::kF32, row.data(), kHeadDim, p % block_tokens,
               block_tokens, strip(p, false));
      StoreValue(KvDtype::kF32, row.data(), kHeadDim, p % block_tokens,
                 block_tokens, strip(p, true));
    }
    const size_t window = GetParam().window;
    const size_t first =
        window != 0 && begin + 1 > window ? begin + 1 - window : 0;
    ASSERT_LE(step.readable_begin, first) << "the window of row " << begin;
    for (size_t p = first; p < end; ++p) {
      float key[kHeadDim], value[kHeadDim];
      LoadKey(KvDtype::kF32, strip(p, false), kHeadDim, p % block_tokens,
              block_tokens, key);
      LoadValue(KvDtype::kF32, strip(p, true), kHeadDim, p % block_tokens,
                block_tokens, value);
      ASSERT_EQ(key[kHeadDim - 1], Content(tokens, layer, p)) << p;
      ASSERT_EQ(value[0], Content(tokens, layer, p)) << p;
    }
  }
};

inline std::vector<int> SomeTokens(size_t count, int from = 1) {
  std::vector<int> tokens(count);
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

TEST_P(GroupCacheConformance, ChunksOfAnySizeHoldTheSame) {
  const std::vector<int> tokens = SomeTokens(150);
  for (const size_t chunk : {1, 7, 16, 50, 150}) {
    const auto group = Make();
    for (size_t at = 0; at < tokens.size(); at += chunk) {
      ASSERT_NO_FATAL_FAILURE(
          Compute(*group, at, std::min(tokens.size(), at + chunk), tokens));
    }
    ASSERT_EQ(group->Held().second, tokens.size());
    ASSERT_EQ(group->ResumeAt(tokens.size(), tokens.size()), tokens.size());
    ASSERT_NO_FATAL_FAILURE(Check(*group, tokens));
  }
}

TEST_P(GroupCacheConformance, AnEmptyGroupBeginsAtZero) {
  const auto group = Make();
  EXPECT_EQ(group->ResumeAt(0, 0), 0u);
  EXPECT_EQ(group->ResumeAt(100, 100), 0u);
  EXPECT_EQ(group->Held(), (std::pair<size_t, size_t>{0, 0}));
  group->Rewind(0);
  group->Forget(0);
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
}

TEST_P(GroupCacheConformance, ADroppedStepLeavesNoTrace) {
  const std::vector<int> tokens = SomeTokens(60);
  const std::vector<int> other = SomeTokens(60, 500);
  const auto group = Make();
  Compute(*group, 0, 40, tokens);
  const size_t blocks = pool_->blocks_in_use();
  {
    std::vector<int> wrong = tokens;
    std::copy(other.begin() + 40, other.end(), wrong.begin() + 40);
    GroupStep step = group->Prepare(40, 60);
    ASSERT_NO_FATAL_FAILURE(Run(step, 40, 60, wrong));
  }
  EXPECT_EQ(pool_->blocks_in_use(), blocks);
  EXPECT_EQ(group->Held().second, 40u);
  ASSERT_NO_FATAL_FAILURE(Check(*group, {tokens.begin(), tokens.begin() + 41}));
}

// Rows that were wrong guesses are dropped: nothing tells that they were there.
TEST_P(GroupCacheConformance, APartOfAStepEqualsAShorterStep) {
  const std::vector<int> tokens = SomeTokens(130);
  std::vector<size_t> keep(29);
  std::iota(keep.begin(), keep.end(), 71);
  for (size_t end = 71; end <= 100; ++end) {
    const auto group = Make(), expected = Make();
    Compute(*group, 0, 70, tokens);
    Compute(*expected, 0, 70, tokens);
    const auto share = group->Share();
    std::vector<int> wrong = tokens;
    for (size_t p = end; p < wrong.size(); ++p) wrong[p] += 1000;
    ASSERT_NO_FATAL_FAILURE(Compute(*expected, 70, end, tokens));
    GroupStep step = group->Prepare(70, 100, keep);
    ASSERT_NO_FATAL_FAILURE(Run(step, 70, 100, wrong));
    group->Commit(step, 70, end);
    group->Forget(group->RewindFloor());
    std::vector<const Block*> blocks, expected_blocks;
    group->AddBlocks(blocks);
    expected->AddBlocks(expected_blocks);
    EXPECT_EQ(blocks.size(), expected_blocks.size());
    ASSERT_EQ(group->Held().second, end);
    ASSERT_NO_FATAL_FAILURE(
        Check(*group, {tokens.begin(), tokens.begin() + 1 +
                                           static_cast<ptrdiff_t>(end)}));
    ASSERT_NO_FATAL_FAILURE(Compute(*group, end, 130, tokens));
    ASSERT_NO_FATAL_FAILURE(Check(*group, tokens));
    ASSERT_NO_FATAL_FAILURE(
        Check(*share, {tokens.begin(), tokens.begin() + 71}));
  }
}

// Before it forgets, a group goes back to any position that was to be kept.
TEST_P(GroupCacheConformance, AllOfAStepIsThereUntilItForgets) {
  const std::vector<int> tokens = SomeTokens(300);
  const std::vector<size_t> keep = {100, 199, 200};
  const auto group = Make();
  Compute(*group, 0, 70, tokens);
  GroupStep step = group->Prepare(70, 300, keep);
  ASSERT_NO_FATAL_FAILURE(Run(step, 70, 300, tokens));
  group->Commit(step, 70, 300);
  std::vector<std::unique_ptr<GroupCache>> shares;
  for (const size_t position : keep) {
    shares.push_back(group->Share());
    shares.back()->Rewind(position);
    shares.back()->Forget(shares.back()->RewindFloor());
  }
  group->Forget(group->RewindFloor());
  ASSERT_NO_FATAL_FAILURE(Check(*group, tokens));
  for (size_t i = 0; i < keep.size(); ++i) {
    ASSERT_EQ(shares[i]->ResumeAt(keep[i], keep[i]), keep[i]);
    ASSERT_NO_FATAL_FAILURE(Compute(*shares[i], keep[i], 300, tokens));
    ASSERT_NO_FATAL_FAILURE(Check(*shares[i], tokens));
  }
}

TEST_P(GroupCacheConformance, SharesNeverSeeEachOther) {
  std::vector<int> left = SomeTokens(90), right = left;
  for (size_t i = 45; i < right.size(); ++i) right[i] += 1000;
  const auto group = Make();
  Compute(*group, 0, 45, left);
  const size_t blocks = pool_->blocks_in_use();
  const auto share = group->Share();
  EXPECT_EQ(pool_->blocks_in_use(), blocks) << "sharing copied a block";
  for (size_t at = 45; at < 90; at += 9) {
    ASSERT_NO_FATAL_FAILURE(Compute(*group, at, at + 9, left));
    ASSERT_NO_FATAL_FAILURE(Compute(*share, at, at + 9, right));
  }
  ASSERT_NO_FATAL_FAILURE(Check(*group, left));
  ASSERT_NO_FATAL_FAILURE(Check(*share, right));
}

TEST_P(GroupCacheConformance, AFailedPrepareChangesNothing) {
  const std::vector<int> tokens = SomeTokens(200);
  const auto group = Make();
  Compute(*group, 0, 40, tokens);
  const auto share = group->Share();
  const size_t blocks = pool_->blocks_in_use();
  size_t failures = 0;
  for (size_t k = 1;; ++k) {
    pool_->FailAfter(k);
    try {
      group->Prepare(40, 200);
      break;
    } catch (const CacheFull&) {
      ++failures;
    }
    EXPECT_EQ(pool_->blocks_in_use(), blocks);
  }
  pool_->FailAfter(0);
  EXPECT_GT(failures, 0u);
  ASSERT_NO_FATAL_FAILURE(Check(*group, {tokens.begin(), tokens.begin() + 41}));
}

TEST_P(GroupCacheConformance, ReferencesReturnToZero) {
  {
    const std::vector<int> tokens = SomeTokens(100);
    const auto group = Make();
    Compute(*group, 0, 50, tokens);
    const auto share = group->Share();
    Compute(*group, 50, 100, tokens);
    GroupStep dropped = share->Prepare(50, 70);
    EXPECT_GT(pool_->blocks_in_use(), 0u);
    std::vector<const Block*> blocks;
    group->AddBlocks(blocks);
    EXPECT_FALSE(blocks.empty());
    group->Rewind(0);
    blocks.clear();
    group->AddBlocks(blocks);
    EXPECT_TRUE(blocks.empty());
  }
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
}

// Any use: whatever a group says it can go on from, it can.
TEST_P(GroupCacheConformance, AnyUseHoldsWhatTheTokensGive) {
  struct Subject {
    std::unique_ptr<GroupCache> group;
    std::vector<int> tokens;
  };
  std::mt19937 rng(7);
  std::vector<Subject> subjects;
  subjects.push_back({Make(), {}});
  for (int step = 0; step < 300; ++step) {
    Subject& s = subjects[rng() % subjects.size()];
    switch (rng() % 5) {
      case 0:  // rewind to where it can go on, or start cold
      {
        const size_t wanted = rng() % (s.tokens.size() + 1);
        const size_t keep = s.group->ResumeAt(wanted, wanted).value_or(0);
        s.group->Rewind(keep);
        s.tokens.resize(keep);
        break;
      }
      case 1:
        if (subjects.size() < 4) {
          Subject share{s.group->Share(), s.tokens};
          subjects.push_back(std::move(share));
        } else {
          std::swap(s, subjects.back());
          subjects.pop_back();
        }
        break;
      default: {
        const size_t begin = s.tokens.size();
        if (begin > 200) break;
        const size_t count = 1 + rng() % 30;
        for (size_t i = 0; i < count; ++i) {
          s.tokens.push_back(static_cast<int>(rng() % 9999));
        }
        ASSERT_NO_FATAL_FAILURE(
            Compute(*s.group, begin, begin + count, s.tokens));
      }
    }
    for (const Subject& subject : subjects) {
      ASSERT_NO_FATAL_FAILURE(Check(*subject.group, subject.tokens)) << step;
    }
  }
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CACHE_GROUP_CACHE_CONFORMANCE_H_
