#include "store/prefix_cache.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "store/filled_prefix.h"

namespace gkv {
namespace {

std::vector<int32_t> Tokens(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = 10 + static_cast<int32_t>(rng() % 900);
  return tokens;
}

std::vector<int32_t> Join(std::vector<int32_t> a,
                          const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PrefixCacheTest : public testing::Test {
 protected:
  std::unique_ptr<Conversation> MakeConversation(
      const std::vector<int32_t>& tokens, size_t block_tokens = 64) {
    auto cache =
        EmptyConversation(layers_, KvDtype::kBF16, block_tokens, pool_);
    cache->Append(cache->Lock(), tokens);
    return cache;
  }
  // Computes all but the last token, and leaves points on the way.
  std::unique_ptr<Conversation> Known(const std::vector<int32_t>& tokens,
                                      std::vector<size_t> at = {}) {
    auto cache = MakeConversation(tokens);
    const auto points = FillByTokens(*cache, tokens.size() - 1, at);
    EXPECT_EQ(points.size(), at.size());
    view_->Publish(*cache, points, true);
    return cache;
  }
  PrefixOffer Find(const Conversation& cache) {
    return view_->Find(cache, cache.tokens(), cache.length() - 1);
  }
  // Adopts what is known, goes on, and holds the same as if it had not.
  size_t ExpectSame(Conversation& cache) {
    const PrefixOffer offer = Find(cache);
    const size_t start = offer.start;
    if (start > 0) {
      EXPECT_TRUE(view_->Take(cache, cache.Lock(), offer));
      EXPECT_EQ(cache.next_position_for_logits(), start);
    }
    FillByTokens(cache, cache.length());
    const auto cold =
        EmptyConversation(layers_, cache.layout().dtype(),
                          cache.layout().block_tokens(), BlockPool::Create());
    cold->Append(cold->Lock(), cache.tokens());
    FillByTokens(*cold, cold->length());
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (layers_[layer].kind == LayerKind::kRecurrent) {
        EXPECT_EQ(cache.CopyLayerState(layer), cold->CopyLayerState(layer));
        continue;
      }
      const size_t window = layers_[layer].window;
      for (const bool values : {false, true}) {
        const std::vector<float> a = cache.CopyLayer(layer, values);
        const std::vector<float> b = cold->CopyLayer(layer, values);
        // Before the window one may hold more than the other.
        const size_t row = layers_[layer].kv_heads * layers_[layer].head_dim;
        const size_t rows =
            std::min(window == 0 ? cache.length() : window, cache.length());
        EXPECT_GE(a.size(), rows * row);
        const auto count = static_cast<ptrdiff_t>(rows * row);
        EXPECT_TRUE(std::equal(a.end() - count, a.end(), b.end() - count));
      }
    }
    return start;
  }

  std::vector<KvLayerSpec> layers_ = SlidingLayers();
  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  std::shared_ptr<PrefixCache> cache_ =
      std::make_shared<PrefixCache>(size_t{64} << 20);
  std::unique_ptr<PrefixView> view_ = View();

  std::unique_ptr<PrefixView> View(const std::string& salt = "") {
    return std::make_unique<PrefixView>(cache_, kFilledFingerprint,
                                        AsBytes(salt), std::vector<int32_t>{1});
  }
};

TEST_F(PrefixCacheTest, AConversationGoesOnWhereAnotherStood) {
  const std::vector<int32_t> first = Tokens(700, 1);
  Known(first);
  for (const size_t block_tokens : {16, 64, 128}) {
    const auto again =
        MakeConversation(Join(first, Tokens(50, 2)), block_tokens);
    EXPECT_EQ(ExpectSame(*again), 699u);
  }
}

TEST_F(PrefixCacheTest, NothingIsCopiedAndNobodyWritesBehindTheIndex) {
  const std::vector<int32_t> first = Tokens(700, 1);
  const auto known = Known(first);
  const size_t blocks = pool_->blocks_in_use();
  EXPECT_EQ(known->nbytes(), pool_->bytes_in_use()) << "the index counts as it";
  const auto again = MakeConversation(Join(first, Tokens(50, 2)));
  EXPECT_TRUE(view_->Take(*again, again->Lock(), Find(*again)));
  EXPECT_EQ(pool_->blocks_in_use(), blocks);
  // Both go on, otherwise, in copies of their own.
  known->Append(known->Lock(), Tokens(80, 3));
  FillByTokens(*known, 760);
  EXPECT_EQ(ExpectSame(*MakeConversation(Join(first, Tokens(9, 4)))), 699u);
}

TEST_F(PrefixCacheTest, TheLongestPointIsTakenAndTheRestComputed) {
  const std::vector<int32_t> first = Tokens(700, 1);
  Known(first, {100, 256, 300});
  const auto parts_at = [&](size_t position) {
    std::vector<int32_t> tokens = first;
    tokens.resize(position);
    return MakeConversation(Join(tokens, Tokens(100, 5)));
  };
  EXPECT_EQ(ExpectSame(*parts_at(99)), 60u) << "a warm-up of 39";
  EXPECT_EQ(ExpectSame(*parts_at(100)), 100u);
  EXPECT_EQ(ExpectSame(*parts_at(130)), 100u);
  EXPECT_EQ(ExpectSame(*parts_at(290)), 256u);
  EXPECT_EQ(ExpectSame(*parts_at(299)), 260u) << "a warm-up of 39";
  EXPECT_EQ(ExpectSame(*parts_at(600)), 561u) << "a warm-up of 39";
  EXPECT_EQ(ExpectSame(*parts_at(30)), 0u);
}

TEST_F(PrefixCacheTest, FullLayersNeedNoPoint) {
  layers_ = FullLayers();
  const std::vector<int32_t> first = Tokens(700, 1);
  Known(first);
  for (const size_t position : {16u, 255u, 256u, 511u, 600u, 699u}) {
    std::vector<int32_t> tokens = first;
    tokens.resize(position);
    EXPECT_EQ(ExpectSame(*MakeConversation(Join(tokens, {5, 6}))), position);
  }
}

TEST_F(PrefixCacheTest, AtLeastOneTokenIsComputed) {
  layers_ = FullLayers();
  const std::vector<int32_t> first = Tokens(600, 1);
  const auto known = Known(first);
  FillByTokens(*known, 600);
  view_->Publish(*known, {}, true);
  EXPECT_EQ(ExpectSame(*MakeConversation(first)), 599u);
}

TEST_F(PrefixCacheTest, RecurrentLayersGoOnFromAPointOnly) {
  layers_ = HybridLayers();
  const std::vector<int32_t> first = Tokens(900, 1);
  Known(first, {310, 512});
  std::vector<int32_t> tokens = first;
  tokens.resize(800);
  EXPECT_EQ(ExpectSame(*MakeConversation(Join(tokens, {5, 6}))), 512u);
  tokens.resize(400);
  EXPECT_EQ(ExpectSame(*MakeConversation(Join(tokens, {5, 6}), 16)), 310u);
  EXPECT_EQ(ExpectSame(*MakeConversation(Join(first, {5, 6}), 128)), 899u);
}

TEST_F(PrefixCacheTest, ACutConversationTakesAPointBack) {
  const auto known = Known(Tokens(700, 1), {500});
  known->Truncate(510);
  known->Append(known->Lock(), Tokens(20, 2));
  const size_t before = known->next_position_for_logits();
  EXPECT_LT(before, 500u);
  EXPECT_EQ(ExpectSame(*known), 500u);
}

TEST_F(PrefixCacheTest, WhyMoreWasNotKnown) {
  const std::vector<int32_t> first = Tokens(700, 1);
  Known(first);
  const auto miss = [&](const std::vector<int32_t>& tokens) {
    const auto cache = MakeConversation(tokens);
    return PrefixView::MissOf(Find(*cache), tokens.size() - 1);
  };
  std::vector<int32_t> part = first;
  part.resize(300);
  EXPECT_EQ(miss(Join(part, Tokens(9, 2))), PrefixMiss::kDivergent);
  EXPECT_EQ(miss(part), PrefixMiss::kNoResumePoint);
  layers_ = FullLayers();
  Known(first);
  part.resize(9);
  EXPECT_EQ(miss(Join(part, Tokens(9, 2))), PrefixMiss::kCheaper);
  cache_->Clear();
  EXPECT_EQ(cache_->stats().ram.bytes, 0u);
  EXPECT_EQ(miss(first), PrefixMiss::kDivergent);
}

TEST_F(PrefixCacheTest, SaltsWeightsAndDtypesAreApart) {
  const std::vector<int32_t> first = Tokens(700, 1);
  Known(first);
  const auto again = MakeConversation(Join(first, {5, 6}));
  const auto tenant = View("tenant");
  EXPECT_EQ(tenant->Find(*again, again->tokens(), 701).match.known, 0u);
  tenant->Publish(*Known(first), {}, true);
  EXPECT_EQ(tenant->Find(*again, again->tokens(), 701).start, 699u);
  const PrefixView other(cache_, {1, 1}, {}, {});
  EXPECT_EQ(other.Find(*again, again->tokens(), 701).match.known, 0u);
  // What belongs to other weights is not taken in.
  other.Publish(*again, {}, true);
  EXPECT_EQ(other.Find(*again, again->tokens(), 701).match.known, 0u);
  const auto f32 = EmptyConversation(layers_, KvDtype::kF32, 64, pool_);
  f32->Append(f32->Lock(), first);
  EXPECT_EQ(Find(*f32).match.known, 0u);
}

TEST_F(PrefixCacheTest, TheBudgetHoldsAndWhatIsUsedStays) {
  const auto budget = size_t{3} << 20;
  cache_ = std::make_shared<PrefixCache>(budget);
  view_ = View();
  const std::vector<int32_t> system = Tokens(600, 1);
  Known(system);
  for (uint32_t chat = 0; chat < 60; ++chat) {
    const auto tokens = Join(system, Tokens(400, 100 + chat));
    const auto cache = MakeConversation(tokens);
    EXPECT_EQ(ExpectSame(*cache), 599u) << chat;
    view_->Publish(*cache, {}, true);
    EXPECT_LE(cache_->stats().ram.bytes, budget);
  }
  EXPECT_GT(cache_->stats().ram.evictions, 0u);
  const auto old =
      MakeConversation(Join(Join(system, Tokens(400, 100)), {7, 8}));
  EXPECT_EQ(PrefixView::MissOf(Find(*old), old->length() - 1),
            PrefixMiss::kEvicted);
}

TEST_F(PrefixCacheTest, AFullPoolGetsBlocksBack) {
  pool_ = BlockPool::Create(size_t{2} << 20);
  for (uint32_t chat = 0; chat < 40; ++chat) Known(Tokens(600, chat));
  EXPECT_GT(cache_->stats().ram.evictions, 0u);
  EXPECT_LE(pool_->bytes_in_use(), pool_->budget_bytes());
  // Together with a conversation that takes all there is.
  const size_t all = pool_->budget_bytes() / (2 * 32 * 2);
  const auto large = MakeConversation(Tokens(all - 800, 99));
  FillByTokens(*large, large->length());
  view_->Publish(*large, {}, true);
  EXPECT_FALSE(cache_->index().GiveUp(BlockPool::Create().get()));
  EXPECT_TRUE(cache_->index().GiveUp(pool_.get()));
  EXPECT_EQ(cache_->stats().ram.pages, 0u);
  EXPECT_EQ(large->nbytes(), pool_->bytes_in_use());
}

TEST_F(PrefixCacheTest, WhatIsPinnedStays) {
  const std::vector<int32_t> first = Tokens(700, 1);
  for (const auto& layers : {SlidingLayers(), FullLayers(), HybridLayers()}) {
    layers_ = layers;
    pool_ = BlockPool::Create();
    cache_ = std::make_shared<PrefixCache>(size_t{4} << 20);
    view_ = View();
    PrefixIndex& index = cache_->index();
    uint64_t pin = 0, page_pin = 0;
    {
      const auto cache = Known(first);
      pin = view_->Pin(*cache);
      const auto pages = Known({first.begin(), first.begin() + 513});
      page_pin = view_->Pin(*pages);
      EXPECT_NE(pin, page_pin);
    }
    const size_t bytes = index.PinnedBytes(pin);
    const size_t all = index.stats().pinned;
    EXPECT_GT(bytes, 0u);
    EXPECT_LE(index.PinnedBytes(page_pin), all);
    EXPECT_LE(all, bytes + index.PinnedBytes(page_pin));
    EXPECT_LE(all, index.stats().bytes);
    EXPECT_LE(index.PinnedBytes(pool_.get()), all);
    // Neither the budget, nor a full pool, nor who would copy takes it.
    for (uint32_t seed = 10; seed < 40; ++seed) Known(Tokens(900, seed));
    EXPECT_GT(index.stats().evictions, 0u);
    EXPECT_LE(index.stats().bytes, index.budget_bytes());
    index.Reclaim(pool_.get(), size_t{1} << 40);
    index.GiveUp(pool_.get());
    EXPECT_EQ(index.stats().bytes, all) << "nothing else is left";
    EXPECT_EQ(ExpectSame(*MakeConversation(Join(first, Tokens(50, 2)))), 699u);
    // What hangs on it goes without it.
    Known(Join(first, Tokens(600, 3)));
    index.GiveUp(pool_.get());
    EXPECT_EQ(index.stats().bytes, all);
    index.Unpin(pin);
    index.Unpin(pin);
    EXPECT_EQ(index.PinnedBytes(pin), 0u);
    EXPECT_EQ(index.stats().pinned, index.PinnedBytes(page_pin));
    index.GiveUp(pool_.get());
    EXPECT_EQ(index.stats().bytes, index.stats().pinned);
    EXPECT_EQ(ExpectSame(*MakeConversation(
                  Join({first.begin(), first.begin() + 513}, Tokens(50, 2)))),
              512u);
    index.GiveUp(pool_.get());
    index.Unpin(page_pin);
    EXPECT_GT(index.stats().bytes, 0u) << "it may go, and need not";
    index.GiveUp(pool_.get());
    EXPECT_EQ(index.stats().bytes, 0u);
    EXPECT_EQ(index.stats().pages + index.stats().resume_points, 0u);
    EXPECT_EQ(pool_->blocks_in_use(), 0u);
  }
}

TEST_F(PrefixCacheTest, ClearEndsPinsOfItsTree) {
  const std::vector<int32_t> tokens = Tokens(700, 1);
  const auto other = View("other");
  const auto cache = Known(tokens);
  const uint64_t pin = view_->Pin(*cache);
  const uint64_t kept = other->Pin(*cache);
  view_->Clear(cache->layout());
  EXPECT_EQ(cache_->index().PinnedBytes(pin), 0u);
  EXPECT_EQ(cache_->index().stats().pinned, cache_->index().PinnedBytes(kept));
  cache_->index().Unpin(pin);
  EXPECT_EQ(Find(*MakeConversation(tokens)).start, 0u);
  cache_->Clear();
  EXPECT_EQ(cache_->index().stats().pinned, 0u);
  EXPECT_EQ(cache_->index().stats().bytes, 0u);
}

TEST_F(PrefixCacheTest, NoMoreIsPinnedThanTheBudget) {
  const auto cache = Known(Tokens(700, 1));
  const size_t bytes = [&] {
    view_->Pin(*cache);
    return cache_->index().stats().pinned;
  }();
  cache_ = std::make_shared<PrefixCache>(3 * bytes);
  view_ = View();
  view_->Pin(*cache);
  view_->Pin(*cache);  // the same again takes nothing
  EXPECT_EQ(cache_->index().stats().pinned, bytes);
  view_->Pin(*Known(Tokens(650, 2)));
  const auto third = Known(Tokens(650, 3));
  try {
    view_->Pin(*third);
    FAIL() << "pinned more than the budget";
  } catch (const CacheFull& error) {
    EXPECT_NE(std::string(error.what()).find(StrCat(3 * bytes)),
              std::string::npos)
        << error.what();
  }
  EXPECT_LE(cache_->index().stats().pinned, 3 * bytes);
  EXPECT_LE(cache_->index().stats().bytes, 3 * bytes);
  EXPECT_EQ(Find(*MakeConversation(Tokens(700, 1))).start, 699u);
  // A pool that what is pinned fills says so.
  pool_ = BlockPool::Create(size_t{1} << 20);
  cache_ = std::make_shared<PrefixCache>(size_t{64} << 20);
  view_ = View();
  view_->Pin(*Known(Tokens(2000, 1)));
  try {
    Known(Tokens(6000, 4));
    FAIL() << "the pool is larger than thought";
  } catch (const CacheFull& error) {
    EXPECT_NE(std::string(error.what()).find("pinned"), std::string::npos)
        << error.what();
  }
}

TEST_F(PrefixCacheTest, CheckpointsThatTheIndexHoldsTooAreReclaimed) {
  const auto known = Known(Tokens(900, 1));
  known->MakeCheckpoint();
  known->Append(known->Lock(), Tokens(400, 2));
  FillByTokens(*known, 1299);
  view_->Publish(*known, {}, true);
  const size_t before = pool_->bytes_in_use();
  EXPECT_GT(known->ReleaseCheckpoints(1), 0u);
  EXPECT_EQ(pool_->bytes_in_use(), before) << "the index has them yet";
  EXPECT_GT(cache_->index().Reclaim(pool_.get(), 1), 0u);
  EXPECT_LT(pool_->bytes_in_use(), before);
}

TEST_F(PrefixCacheTest, OneThatIsGoneLeavesNothing) {
  {
    const auto known = Known(Tokens(700, 1), {300});
    EXPECT_GT(pool_->blocks_in_use(), 0u);
  }
  EXPECT_GT(pool_->blocks_in_use(), 0u);
  view_.reset();
  cache_.reset();
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
}

TEST_F(PrefixCacheTest, PointsAreBoundariesAndTheLastCandidate) {
  std::vector<int32_t> tokens(700, 7);
  const std::vector<size_t> boundaries{40, 900};
  EXPECT_EQ(view_->ChoosePoints(tokens, boundaries, 0),
            (std::vector<size_t>{40, 512}));
  EXPECT_EQ(view_->ChoosePoints(tokens, boundaries, 100),
            (std::vector<size_t>{512}));
  tokens[650] = 1;
  EXPECT_EQ(view_->ChoosePoints(tokens, {}, 0), (std::vector<size_t>{650}));
  EXPECT_TRUE(view_->ChoosePoints(tokens, {}, 650).empty());
}

// Many threads, one index, a pool that is always full.
TEST_F(PrefixCacheTest, ThreadsShareOneIndex) {
  layers_ = HybridLayers();
  cache_ = std::make_shared<PrefixCache>(size_t{4} << 20);
  pool_ = BlockPool::Create(size_t{8} << 20);
  view_ = View();
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (size_t i = 0; i < 40; ++i) {
        const auto cache = MakeConversation(
            Join(Tokens(300, rng() % 3), Tokens(1 + rng() % 400, rng() % 5)),
            16u << (rng() % 3));
        EXPECT_NO_THROW(ExpectSame(*cache));
        view_->Publish(*cache, {}, true);
        if (rng() % 16 == 0) view_->Clear(cache->layout());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  cache_->Clear();
  EXPECT_EQ(cache_->stats().ram.bytes, 0u);
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
}

// Random conversations against cold ones, in every dtype and block size.
class PrefixRandomTest
    : public testing::TestWithParam<std::tuple<KvDtype, size_t, int>> {};

TEST_P(PrefixRandomTest, SameAsCold) {
  const auto [dtype, block_tokens, which] = GetParam();
  const auto layers = which == 0   ? FullLayers()
                      : which == 1 ? SlidingLayers()
                                   : HybridLayers();
  const auto pool = BlockPool::Create();
  const auto prefix = std::make_shared<PrefixCache>(size_t{2} << 20);
  PrefixView view(prefix, kFilledFingerprint, {}, {1});
  std::mt19937 rng(7);
  size_t taken = 0;
  for (size_t i = 0; i < 150; ++i) {
    std::vector<int32_t> tokens = Tokens(700, rng() % 3);
    tokens.resize(1 + rng() % 700);
    tokens = Join(tokens, Tokens(rng() % 100, rng() % 5));
    const size_t mine = rng() % 4 == 0 ? 16u << (rng() % 4) : block_tokens;
    const auto cache = EmptyConversation(layers, dtype, mine, pool);
    cache->Append(cache->Lock(), tokens);
    const PrefixOffer offer = view.Find(*cache, tokens, tokens.size() - 1);
    if (offer.start > 0) {
      ASSERT_TRUE(view.Take(*cache, cache->Lock(), offer));
      ASSERT_EQ(cache->next_position_for_logits(), offer.start);
      taken += offer.start;
    }
    std::vector<size_t> at;
    for (size_t p = 1 + rng() % 200; p < tokens.size(); p += 1 + rng() % 200) {
      at.push_back(p);
    }
    const size_t from = offer.computed;
    std::erase_if(at, [&](size_t p) { return p <= from + 40; });
    const size_t end = tokens.size() - rng() % 2;
    const auto points = FillByTokens(*cache, end, at, 1 + rng() % 60);
    view.Publish(*cache, points, rng() % 3 != 0);
    const std::vector<float> numbers = FillNumbers(tokens);
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      if (layers[layer].kind == LayerKind::kRecurrent) {
        if (end > 0) {
          EXPECT_EQ(cache->CopyLayerState(layer)[0], numbers[end - 1]);
        }
        continue;
      }
      const auto [begin, held] = cache->HeldRange(layer);
      ASSERT_EQ(held, end);
      const size_t row = layers[layer].kv_heads * layers[layer].head_dim;
      const std::vector<float> values = cache->CopyLayer(layer, true);
      for (size_t p = begin; p < held; ++p) {
        std::vector<float> expected(row), stored(row);
        for (size_t head = 0; head < layers[layer].kv_heads; ++head) {
          const size_t dim = layers[layer].head_dim;
          const std::vector<float> x(dim,
                                     numbers[p] + static_cast<float>(head));
          std::vector<uint8_t> strip(KvStripBytes(dtype, 16, dim));
          StoreValue(dtype, x.data(), dim, 0, 16, strip.data());
          LoadValue(dtype, strip.data(), dim, 0, 16,
                    expected.data() + head * dim);
        }
        std::copy_n(values.begin() + static_cast<ptrdiff_t>((p - begin) * row),
                    row, stored.begin());
        ASSERT_EQ(stored, expected) << "position " << p;
      }
    }
  }
  EXPECT_GT(taken, 5000u);
  prefix->Clear();
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

INSTANTIATE_TEST_SUITE_P(All, PrefixRandomTest,
                         testing::Combine(testing::Values(KvDtype::kF32,
                                                          KvDtype::kBF16,
                                                          KvDtype::kInt8),
                                          testing::Values(16, 32, 64, 128),
                                          testing::Values(0, 1, 2)));

}  // namespace
}  // namespace gkv
