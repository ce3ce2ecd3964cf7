// What requests do with a prefix cache, without a model and without a
// scheduler: a test says who takes a prompt's rows.

#include "engine/prefix_use.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "store/filled_prefix.h"
#include "store/memory_store.h"

namespace gkv {
namespace {

using Ids = std::vector<int32_t>;

Ids RandomIds(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  Ids ids(count);
  for (int32_t& id : ids) id = 10 + static_cast<int32_t>(rng() % 900);
  return ids;
}

Ids Join(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// One request, driven by hand.
struct Driven {
  std::shared_ptr<Conversation> cache;
  std::shared_ptr<TokenStream> stream;
  size_t limit;
  std::unique_ptr<PrefixUse> use;

  bool Resume() const { return use->Resume(limit); }
  // A step over [next, end); returns the points that it takes.
  std::vector<size_t> Compute(size_t end) const {
    const size_t begin = cache->next_position_for_logits();
    const std::vector<size_t> points = use->PointsIn(begin, end);
    std::vector<size_t> keep;
    for (const size_t p : points) {
      if (p < end) keep.push_back(p);
    }
    KvStepView view = stream->transaction().Prepare(begin, end, keep);
    use->Publish(
        cache->Commit(stream->transaction().lock(), view, end, points), end);
    return points;
  }
};

class PrefixUseTest : public ::testing::Test {
 protected:
  void UseTiers(PrefixTiers tiers) {
    prefix_ = std::make_shared<PrefixCache>(
        size_t{64} << 20, std::move(tiers),
        PrefixTierOptions{.time_out = std::chrono::minutes(10)});
  }
  std::shared_ptr<PrefixView> View(const std::string& salt = "") {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(salt.data());
    auto view = std::make_shared<PrefixView>(prefix_, kFilledFingerprint,
                                             std::span(bytes, salt.size()),
                                             std::vector<int32_t>{1});
    view->set_seconds_per_token(0.1);  // whatever there is, loading is quicker
    return view;
  }
  Driven Make(const Ids& prompt, PrefixAccess access) {
    Driven driven;
    driven.cache = EmptyConversation(layers_, KvDtype::kBF16, 64, pool_);
    driven.stream = std::make_shared<TokenStream>(
        driven.cache, driven.cache->Lock(), prompt, TokenStream::Options{});
    driven.limit = prompt.size() - 1;
    driven.use = std::make_unique<PrefixUse>(std::move(access), *driven.stream,
                                             driven.limit);
    return driven;
  }
  Driven Make(const Ids& prompt, PrefixMode mode = PrefixMode::kOn) {
    return Make(prompt, {View(), mode, {}});
  }

  std::vector<KvLayerSpec> layers_ = FullLayers();
  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<PrefixCache> prefix_ =
      std::make_shared<PrefixCache>(size_t{64} << 20);
  std::shared_ptr<WakeUp> wake_up_ = std::make_shared<WakeUp>();
};

TEST_F(PrefixUseTest, WhatOneLeavesAtItsEndAnotherTakesOver) {
  const Ids prompt = RandomIds(300, 1);
  const Driven first = Make(prompt);
  EXPECT_FALSE(first.Resume());
  first.Compute(299);
  first.use->End(true);
  const Driven second = Make(Join(prompt, RandomIds(50, 2)));
  EXPECT_TRUE(second.Resume());
  EXPECT_EQ(second.cache->next_position_for_logits(), 299u);
  const Driven reads_not = Make(prompt, PrefixMode::kWrite);
  EXPECT_FALSE(reads_not.Resume());
  EXPECT_EQ(prefix_->stats().requests, 2u);
}

TEST_F(PrefixUseTest, WhatNothingWasComputedOfIsNotPublished) {
  const Ids prompt = RandomIds(300, 1);
  const Driven first = Make(prompt);
  first.Resume();
  first.use->End(false);
  EXPECT_EQ(prefix_->stats().ram.bytes, 0u);
  const Driven only_reads = Make(prompt, PrefixMode::kRead);
  only_reads.Resume();
  EXPECT_TRUE(only_reads.Compute(299).empty());
  only_reads.use->End(true);
  EXPECT_EQ(prefix_->stats().ram.bytes, 0u);
}

TEST_F(PrefixUseTest, AFollowerWaitsUpToWhereThePromptsPart) {
  const Ids common = RandomIds(300, 1);
  const Driven leader = Make(Join(common, RandomIds(200, 2)));
  const Driven follower = Make(Join(common, RandomIds(100, 3)));
  EXPECT_FALSE(follower.use->Follow(*leader.use, wake_up_))
      << "it has not begun";
  leader.Resume();
  EXPECT_TRUE(leader.use->leads());
  EXPECT_TRUE(follower.use->Follow(*leader.use, wake_up_));
  EXPECT_TRUE(follower.use->follows());
  leader.Compute(290);
  EXPECT_TRUE(follower.use->follows());
  const std::vector<size_t> points = leader.Compute(400);
  EXPECT_TRUE(std::count(points.begin(), points.end(), 300)) << "for it";
  EXPECT_FALSE(follower.use->follows());
  EXPECT_FALSE(follower.use->Follow(*leader.use, wake_up_))
      << "it is far enough";
  EXPECT_TRUE(follower.Resume());
  EXPECT_EQ(follower.cache->next_position_for_logits(), 300u);
}

TEST_F(PrefixUseTest, ALeaderThatEndsHoldsUpNobody) {
  const Ids prompt = RandomIds(300, 1);
  auto leader = std::make_unique<Driven>(Make(prompt));
  const Driven follower = Make(prompt);
  leader->Resume();
  leader->Compute(100);
  ASSERT_TRUE(follower.use->Follow(*leader->use, wake_up_));
  leader->use->End(true);
  EXPECT_FALSE(follower.use->follows());
  EXPECT_FALSE(leader->use->leads());
  EXPECT_FALSE(follower.use->Follow(*leader->use, wake_up_));
  // Not after it has given its blocks back, either.
  leader->Resume();
  EXPECT_FALSE(leader->use->leads());
  leader.reset();
  EXPECT_FALSE(follower.use->follows());
  follower.Resume();
  EXPECT_EQ(follower.cache->next_position_for_logits(), 100u);
}

TEST_F(PrefixUseTest, WhoIsNotFollowed) {
  const Ids prompt = RandomIds(300, 1);
  const auto follows = [&](PrefixAccess leads, PrefixAccess wants,
                           size_t common = 300) {
    const Driven leader = Make(prompt, std::move(leads));
    leader.Resume();
    Ids other(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(common));
    const Driven follower =
        Make(Join(other, RandomIds(300, 2)), std::move(wants));
    return follower.use->Follow(*leader.use, wake_up_);
  };
  const auto view = View();
  EXPECT_TRUE(follows({view}, {view}));
  EXPECT_TRUE(follows({view}, {View()})) << "which sees the same";
  EXPECT_TRUE(follows({view, PrefixMode::kWrite}, {view, PrefixMode::kRead}));
  EXPECT_FALSE(follows({view, PrefixMode::kRead}, {view}));
  EXPECT_FALSE(follows({view}, {view, PrefixMode::kWrite}));
  EXPECT_FALSE(follows({view}, {View("another tenant")}));
  EXPECT_FALSE(follows({view}, {view}, 64)) << "not worth waiting for";
  EXPECT_FALSE(follows({}, {}));
  // One that has read its prompt leads nobody.
  const Driven leader = Make(prompt);
  leader.Resume();
  leader.Compute(300);
  EXPECT_FALSE(leader.use->leads());
}

TEST_F(PrefixUseTest, WhatIsKnownIsNotWaitedFor) {
  const Ids prompt = RandomIds(300, 1);
  const Driven first = Make(prompt);
  first.Resume();
  first.Compute(299);
  first.use->End(true);
  // It does not read, so it computes all of this again.
  const Driven leader = Make(prompt, PrefixMode::kWrite);
  leader.Resume();
  ASSERT_TRUE(leader.use->leads());
  EXPECT_FALSE(Make(prompt).use->Follow(*leader.use, wake_up_));
}

TEST_F(PrefixUseTest, AFetchWaitsForItsTier) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  UseTiers({disk});
  const Ids prompt = RandomIds(300, 1);
  {
    const Driven first = Make(prompt);
    first.Resume();
    first.Compute(299);
    first.use->End(true);
  }
  ASSERT_TRUE(prefix_->Flush());
  prefix_->Clear(PrefixTier::kRam);
  disk->Hang();
  const Driven second = Make(Join(prompt, RandomIds(100, 2)));
  EXPECT_TRUE(second.use->Fetch(wake_up_));
  EXPECT_TRUE(second.use->fetches());
  EXPECT_GT(second.use->fetch_deadline(), PrefixUse::Clock::now());
  disk->Release();
  {
    MutexLock lock(wake_up_->mutex);
    wake_up_->changed.Wait(lock, [&] { return !second.use->fetches(); });
  }
  EXPECT_FALSE(second.use->Fetch(wake_up_)) << "they are asked once";
  EXPECT_TRUE(second.Resume());
  EXPECT_EQ(second.stream->transaction().cache().next_position_for_logits(),
            256u)
      << "the last page";
  EXPECT_EQ(prefix_->stats().tokens.disk, 256u);
}

TEST_F(PrefixUseTest, AFetchIsLeftAtTheEnd) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  UseTiers({disk});
  disk->Hang();
  const Driven one = Make(RandomIds(300, 1));
  ASSERT_TRUE(one.use->Fetch(wake_up_));
  one.use->End(false);
  EXPECT_FALSE(one.use->fetches());
  // Its time is not over, and it is started all the same.
  const Driven other = Make(RandomIds(300, 2));
  ASSERT_TRUE(other.use->Fetch(wake_up_));
  EXPECT_FALSE(other.Resume());
  EXPECT_FALSE(other.use->fetches());
  disk->Release();
}

TEST_F(PrefixUseTest, PointsAreThoseOfTheStep) {
  const auto view = View();
  const Driven one =
      Make(RandomIds(9000, 1), {view, PrefixMode::kOn, {70, 90}});
  one.Resume();
  EXPECT_EQ(one.use->PointsIn(0, 80), (std::vector<size_t>{70}));
  EXPECT_EQ(one.use->PointsIn(0, 90), (std::vector<size_t>{70, 90}));
  EXPECT_EQ(one.use->PointsIn(70, 90), (std::vector<size_t>{90}));
  EXPECT_EQ(one.use->PointsIn(4000, 4100), (std::vector<size_t>{4096}));
  one.Compute(80);
  EXPECT_TRUE(one.use->PointsIn(60, 90).empty()) << "this may be a warm-up";
}

TEST_F(PrefixUseTest, AShortPromptIsKnownTheSecondTime) {
  const auto disk = std::make_shared<MemoryStore>("disk");
  UseTiers({disk});
  layers_ = SlidingLayers();
  const Ids prompt = RandomIds(100, 1);
  {
    const Driven first = Make(prompt);
    first.Resume();
    EXPECT_EQ(first.Compute(100), std::vector<size_t>{99});
    first.use->End(true);
  }
  const Driven second = Make(prompt);
  EXPECT_TRUE(second.Resume());
  EXPECT_EQ(second.cache->next_position_for_logits(), 99u);
  ASSERT_TRUE(prefix_->Flush());
  EXPECT_EQ(disk->stats().entries, 1u) << "the end alone";
  // One that a turn ends, or that is hardly there, leaves what it did.
  Ids turns = RandomIds(100, 2);
  turns[80] = 1;
  const Driven third = Make(turns);
  third.Resume();
  EXPECT_EQ(third.use->PointsIn(0, 100), std::vector<size_t>{80});
  const Driven few = Make(RandomIds(60, 3));
  few.Resume();
  EXPECT_TRUE(few.use->PointsIn(0, 60).empty());
}

TEST_F(PrefixUseTest, APromptThatPartsInTheMiddleFindsAPoint) {
  // Warming up all windows anew would begin before the point.
  layers_ = {{LayerKind::kSliding, 2, 32, 512},
             {LayerKind::kSliding, 2, 32, 512},
             {LayerKind::kFull, 1, 32, 0}};
  const Ids prompt = RandomIds(3000, 1);
  const Driven first = Make(prompt);
  first.Resume();
  EXPECT_EQ(first.Compute(3000), (std::vector<size_t>{1536, 2816}));
  first.use->End(true);
  const Ids begin(prompt.begin(), prompt.begin() + 2000);
  const Driven edited = Make(Join(begin, RandomIds(1000, 2)));
  EXPECT_TRUE(edited.Resume());
  EXPECT_EQ(edited.cache->next_position_for_logits(), 1536u);
  // Only of what is left; and long ones have others.
  const Driven more = Make(Join(begin, RandomIds(1600, 3)));
  EXPECT_TRUE(more.Resume());
  const std::vector<size_t> points = more.use->PointsIn(1536, 3600);
  EXPECT_TRUE(std::count(points.begin(), points.end(), 2816));
  const Driven longer = Make(RandomIds(5000, 4));
  longer.Resume();
  EXPECT_EQ(longer.use->PointsIn(0, 5000), (std::vector<size_t>{4096, 4864}));
}

TEST_F(PrefixUseTest, APointInTheMiddlePushesOutNothingElse) {
  layers_ = {{LayerKind::kSliding, 2, 32, 512},
             {LayerKind::kSliding, 2, 32, 512},
             {LayerKind::kFull, 1, 32, 0}};
  const size_t window = EmptyConversation(layers_, KvDtype::kBF16, 64, pool_)
                            ->layout()
                            .checkpoint_bytes();
  const Ids prompt = RandomIds(3000, 1);
  const auto points = [&](size_t windows) {
    prefix_ = std::make_shared<PrefixCache>(windows * window);
    const Driven one = Make(prompt);
    one.Resume();
    return one.use->PointsIn(0, 3000);
  };
  EXPECT_EQ(points(8), (std::vector<size_t>{1536, 2816}));
  EXPECT_EQ(points(7), std::vector<size_t>{2816});
}

TEST_F(PrefixUseTest, PointsAreNearWhereTheyShareTheirBlocks) {
  const Ids prompt = RandomIds(900, 1);
  const auto points = [&] {
    const Driven one = Make(prompt);
    one.Resume();
    return one.use->PointsIn(0, 900);
  };
  EXPECT_EQ(points(), std::vector<size_t>{768}) << "nothing is forgotten";
  layers_ = {{LayerKind::kSliding, 2, 32, 1024}, {LayerKind::kFull, 1, 32, 0}};
  EXPECT_EQ(points(), (std::vector<size_t>{256, 512, 768}));
  // States are copied.
  layers_.push_back(HybridLayers()[0]);
  EXPECT_EQ(points(), (std::vector<size_t>{512, 768}));
}

TEST_F(PrefixUseTest, AFullPoolTakesPointsAndAtLastAll) {
  const auto view = View();
  const Driven one = Make(RandomIds(300, 1), {view, PrefixMode::kOn, {70}});
  one.Resume();
  EXPECT_FALSE(one.use->PointsIn(0, 80).empty());
  EXPECT_TRUE(one.use->GiveUpIndexed()) << "points need room";
  EXPECT_TRUE(one.use->PointsIn(0, 80).empty());
  EXPECT_FALSE(one.use->GiveUpIndexed()) << "nothing is left to give up";
  EXPECT_TRUE(one.use->Leave());
  EXPECT_FALSE(one.use->Leave());
  EXPECT_FALSE(one.use->leads());
  one.Compute(299);
  one.use->End(true);
  EXPECT_EQ(prefix_->stats().ram.bytes, 0u);
}

TEST_F(PrefixUseTest, WithoutAPrefixCacheNothingHappens) {
  const Driven one = Make(RandomIds(300, 1), PrefixAccess{});
  EXPECT_FALSE(one.use->reads());
  EXPECT_FALSE(one.use->Fetch(wake_up_));
  EXPECT_FALSE(one.Resume());
  EXPECT_FALSE(one.use->leads());
  EXPECT_TRUE(one.Compute(299).empty());
  EXPECT_FALSE(one.use->GiveUpIndexed());
  EXPECT_FALSE(one.use->Leave());
  one.use->NoteSpeed(1);
  one.use->End(true);
}

}  // namespace
}  // namespace gkv
