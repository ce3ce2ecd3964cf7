// What goes between the index and the tiers below it: writing through, and
// loading back.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/no_threads.h"
#include "base/sanitized.h"
#include "io/temp_folder.h"
#include "store/filled_prefix.h"
#include "store/folder_store.h"
#include "store/folder_sweep.h"
#include "store/memory_store.h"
#include "store/prefix_cache.h"

namespace gkv {
namespace {

using Ids = std::vector<int32_t>;
using std::chrono::milliseconds;

Ids Tokens(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  Ids tokens(count);
  for (int32_t& token : tokens) token = 10 + static_cast<int32_t>(rng() % 900);
  return tokens;
}

Ids Join(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PrefixTiersTest : public testing::Test {
 protected:
  void SetUp() override { Restart(); }

  // A new process, as far as the tiers see it.
  void Restart() {
    view_.reset();
    cache_.reset();
    cache_ = std::make_shared<PrefixCache>(ram_bytes_, tiers_, options_);
    view_ = View();
  }
  std::unique_ptr<PrefixView> View(const std::string& salt = "") {
    auto view = std::make_unique<PrefixView>(
        cache_, kFilledFingerprint, AsBytes(salt), std::vector<int32_t>{1});
    view->set_seconds_per_token(seconds_);
    return view;
  }
  std::unique_ptr<Conversation> MakeConversation(const Ids& tokens,
                                                 size_t block_tokens = 64) {
    auto cache =
        EmptyConversation(layers_, KvDtype::kBF16, block_tokens, pool_);
    cache->Append(cache->Lock(), tokens);
    return cache;
  }
  // Computes all but the last token, and leaves points on the way.
  void Publish(const Ids& tokens, std::vector<size_t> at = {},
               const PrefixView* view = nullptr) {
    const auto cache = MakeConversation(tokens);
    const auto points = FillByTokens(*cache, tokens.size() - 1, at);
    (view ? view : view_.get())->Publish(*cache, points, true);
  }
  std::shared_ptr<PrefixFetch> Ask(const Conversation& cache) {
    return view_->Fetch(cache, cache.tokens(), cache.length() - 1, {}, {});
  }
  // Waits until it is done, though its time may be over: nobody leaves its tier
  // for that.
  static void WaitFor(PrefixFetch& fetch) {
    while (!fetch.done()) {
      fetch.Wait();
      std::this_thread::yield();
    }
  }
  // What came of RAM and the tiers, once it went on and holds what a cold one
  // does.
  PrefixHit GoOn(const Ids& tokens, size_t block_tokens = 64) {
    const auto cache = MakeConversation(tokens, block_tokens);
    const auto fetch = Ask(*cache);
    if (fetch) WaitFor(*fetch);
    const PrefixOffer offer =
        view_->Find(*cache, tokens, tokens.size() - 1, fetch.get());
    PrefixHit hit;
    if (offer.start > 0) {
      EXPECT_TRUE(view_->Take(*cache, cache->Lock(), offer));
      EXPECT_EQ(cache->next_position_for_logits(), offer.start);
      hit = PrefixView::HitOf(offer, 0, offer.start);
    }
    FillByTokens(*cache, cache->length());
    const auto cold = EmptyConversation(layers_, KvDtype::kBF16, block_tokens,
                                        BlockPool::Create());
    cold->Append(cold->Lock(), tokens);
    FillByTokens(*cold, cold->length());
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      if (layers_[layer].kind == LayerKind::kRecurrent) {
        EXPECT_EQ(cache->CopyLayerState(layer), cold->CopyLayerState(layer));
        continue;
      }
      const size_t window = layers_[layer].window;
      const size_t row = layers_[layer].kv_heads * layers_[layer].head_dim;
      const size_t rows =
          std::min(window == 0 ? cache->length() : window, cache->length());
      for (const bool values : {false, true}) {
        const std::vector<float> a = cache->CopyLayer(layer, values);
        const std::vector<float> b = cold->CopyLayer(layer, values);
        EXPECT_GE(a.size(), rows * row);
        const auto count = static_cast<ptrdiff_t>(rows * row);
        EXPECT_TRUE(std::equal(a.end() - count, a.end(), b.end() - count));
      }
    }
    return hit;
  }

  std::vector<KvLayerSpec> layers_ = SlidingLayers();
  std::shared_ptr<BlockPool> pool_ = BlockPool::Create();
  size_t ram_bytes_ = size_t{64} << 20;
  double seconds_ = 0.1;  // a token: whatever there is, loading is quicker
  PrefixTierOptions options_;
  std::shared_ptr<MemoryStore> disk_ = std::make_shared<MemoryStore>();
  PrefixTiers tiers_{disk_};
  std::shared_ptr<PrefixCache> cache_;
  std::unique_ptr<PrefixView> view_;
};

TEST_F(PrefixTiersTest, AnotherProcessGoesOnWhereThisOneStood) {
  const Ids first = Tokens(700, 1);
  for (const auto& layers : {FullLayers(), SlidingLayers(), HybridLayers()}) {
    layers_ = layers;
    Publish(first, {300, 512});
    cache_->Flush();
    for (const size_t block_tokens : {16, 64, 128}) {
      Restart();
      const PrefixHit hit = GoOn(Join(first, Tokens(50, 2)), block_tokens);
      EXPECT_EQ(hit.total(), 512u) << "the last candidate";
      EXPECT_EQ(hit.disk, hit.total());
      const PrefixHit again = GoOn(Join(first, Tokens(50, 3)), block_tokens);
      EXPECT_EQ(again.ram, again.total()) << "RAM has it by now";
    }
  }
}

TEST_F(PrefixTiersTest, EndsOfTurnsAreFound) {
  Ids chat = Tokens(300, 1);
  chat.push_back(1);  // ends the turn; never computed
  Publish(chat);
  cache_->Flush();
  Restart();
  EXPECT_EQ(GoOn(Join(chat, Tokens(20, 2))).disk, 300u);
}

TEST_F(PrefixTiersTest, MappedObjectsAreNotCopied) {
  disk_ = std::make_shared<MemoryStore>("shared", true);
  tiers_ = {disk_};
  layers_ = FullLayers();
  Restart();
  const Ids first = Tokens(600, 1);
  Publish(first);
  cache_->Flush();
  Restart();
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
  const auto cache = MakeConversation(Join(first, Tokens(9, 2)));
  const auto fetch = Ask(*cache);
  WaitFor(*fetch);
  const PrefixOffer offer =
      view_->Find(*cache, cache->tokens(), cache->length() - 1, fetch.get());
  EXPECT_EQ(offer.start, 512u);
  EXPECT_TRUE(view_->Take(*cache, cache->Lock(), offer));
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
  EXPECT_EQ(PrefixView::HitOf(offer, 0, 512).shared, 512u);
  FillByTokens(*cache, cache->length());
}

TEST_F(PrefixTiersTest, PagesComeFirstAndThePointLast) {
  layers_ = HybridLayers();
  Publish(Tokens(900, 1), {600});
  cache_->Flush();
  std::set<Address> there;
  size_t points = 0;
  for (const ObjectKey& key : disk_->keys()) {
    if (key.kind == ObjectKind::kPage && key.end > kPageTokens) {
      EXPECT_TRUE(there.contains(key.parent));
    }
    if (key.kind == ObjectKind::kWindowPage) {
      EXPECT_TRUE(there.contains(key.parent)) << "its page";
    }
    if (key.kind == ObjectKind::kResume) {
      EXPECT_TRUE(there.contains(key.parent)) << "the last whole page";
      ++points;
    }
    there.insert(key.address);
  }
  EXPECT_EQ(points, 2u);
  const size_t written = disk_->stats().writes;
  EXPECT_EQ(cache_->stats().writer.written, written);
  // What is there already is not even encoded.
  Restart();
  Publish(Tokens(900, 1), {600});
  cache_->Flush();
  EXPECT_EQ(cache_->stats().writer.written, 0u);
  EXPECT_EQ(disk_->stats().writes, written);
}

TEST_F(PrefixTiersTest, AnIndexWithoutRoomWritesAllTheSame) {
  ram_bytes_ = 0;
  Restart();
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  EXPECT_EQ(cache_->stats().ram.bytes, 0u);
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(GoOn(Join(first, Tokens(50, 2))).disk, 512u);
  }
}

TEST_F(PrefixTiersTest, APageThatATierLostIsWrittenAgain) {
  layers_ = FullLayers();
  const Ids first = Tokens(700, 1);
  Publish(first);
  cache_->Flush();
  const std::vector<ObjectKey> keys = disk_->keys();
  disk_->Remove({keys.data(), 1});
  Publish(Join(first, Tokens(300, 2)));
  cache_->Flush();
  Restart();
  EXPECT_EQ(GoOn(Join(first, Tokens(300, 2))).disk, 768u);
}

TEST_F(PrefixTiersTest, AFullQueueDropsTheOldest) {
  options_.queue_bytes = 1;
  Restart();
  disk_->Hang();
  Publish(Tokens(300, 0));
  // The writer has it: what comes now waits in the queue.
  while (disk_->hanging() == 0) std::this_thread::yield();
  for (uint32_t i = 1; i < 5; ++i) Publish(Tokens(300, i));
  const PrefixWriterStats stats = cache_->stats().writer;
  EXPECT_LE(stats.queued, 2u);
  EXPECT_GE(stats.dropped, 3u * 2);
  disk_->Release();
  cache_->Flush();
  Restart();
  EXPECT_EQ(GoOn(Join(Tokens(300, 3), Tokens(9, 9))).total(), 0u);
}

TEST_F(PrefixTiersTest, AFullPoolTakesBackWhatIsQueued) {
  pool_ = BlockPool::Create(size_t{1} << 20);
  disk_->Hang();
  for (uint32_t i = 0; i < 20; ++i) Publish(Tokens(700, i));
  // Everything that there is, for one conversation.
  const size_t room = pool_->budget_bytes() / (2 * 32 * 2) - 800;
  const auto large = MakeConversation(Tokens(room, 99));
  EXPECT_NO_THROW(FillByTokens(*large, large->length()));
  EXPECT_GT(cache_->stats().writer.dropped, 0u);
  disk_->Release();
  cache_->Flush();
}

TEST_F(PrefixTiersTest, NbytesCountsWhatTheQueueRefersTo) {
  disk_->Hang();
  const auto cache = MakeConversation(Tokens(700, 1));
  FillByTokens(*cache, 699);
  const size_t before = cache->nbytes();
  view_->Publish(*cache, {}, true);
  EXPECT_EQ(cache->nbytes(), before);
  disk_->Release();
  cache_->Flush();
  EXPECT_EQ(cache->nbytes(), before);
}

TEST_F(PrefixTiersTest, WritesThatFailAreComputedAgain) {
  disk_->set_fail_writes(true);
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  EXPECT_GT(disk_->stats().failed_writes, 0u);
  Restart();
  EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
}

TEST_F(PrefixTiersTest, DamagedObjectsAreMissesAndTold) {
  const Ids first = Tokens(700, 1);
  for (const auto kind :
       {ObjectKind::kPage, ObjectKind::kWindowPage, ObjectKind::kResume}) {
    layers_ = HybridLayers();
    disk_->Clear(nullptr);
    Restart();
    Publish(first, {300, 512});
    cache_->Flush();
    std::mt19937 rng(1);
    for (int how = 0; how < 6; ++how) {
      Restart();
      disk_->set_change([&](const ObjectKey& key, AlignedBuffer<uint8_t>& b) {
        if (key.kind != kind) return;
        if (how == 5) b = AlignedBuffer<uint8_t>(b.size() / 2);
        for (int i = 0; i < 1 + how; ++i) b.data()[rng() % b.size()] ^= 4;
      });
      const size_t damaged = disk_->stats().damaged;
      EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
      EXPECT_GT(disk_->stats().damaged, damaged);
      EXPECT_GT(cache_->stats().loader.tiers[0].damaged, 0u);
      disk_->set_change({});
      // They were removed; who computes them brings them back.
      Publish(first, {300, 512});
      cache_->Flush();
      Restart();
      EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 512u);
    }
  }
}

// An object that is whole, under the name of another one.
TEST_F(PrefixTiersTest, AnothersObjectIsNotTaken) {
  const Ids first = Tokens(700, 1);
  layers_ = FullLayers();
  const auto tenant = View("tenant");
  Publish(first, {}, tenant.get());
  Publish(first);
  cache_->Flush();
  const std::vector<ObjectKey> keys = disk_->keys();
  StoredBytes other;
  for (const ObjectKey& key : keys) {
    if (key.kind == ObjectKind::kPage && key.end == kPageTokens &&
        key.salt != Address{}) {
      other = disk_->Load({&key, 1})[0].object;
    }
  }
  ASSERT_FALSE(other.bytes.empty());
  disk_->set_change([&](const ObjectKey& key, AlignedBuffer<uint8_t>& bytes) {
    if (key.end != kPageTokens || key.kind != ObjectKind::kPage) return;
    bytes = AlignedBuffer<uint8_t>(other.bytes.size());
    std::memcpy(bytes.data(), other.bytes.data(), other.bytes.size());
  });
  Restart();
  EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
  EXPECT_GT(disk_->stats().damaged, 0u);
}

TEST_F(PrefixTiersTest, SaltsAreApart) {
  const Ids first = Tokens(700, 1);
  const auto tenant = View("tenant");
  Publish(first, {512}, tenant.get());
  cache_->Flush();
  Restart();
  EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
  view_ = View("tenant");
  EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 512u);
}

TEST_F(PrefixTiersTest, HalfAChainIsAMissAndTheNextPointIsTaken) {
  layers_ = HybridLayers();
  const Ids first = Tokens(1300, 1);
  Publish(first, {512, 768, 1024});
  cache_->Flush();
  Restart();
  disk_->set_lose([](const ObjectKey& key) {
    return key.kind == ObjectKind::kPage && key.end == 768;
  });
  EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 512u);
  disk_->set_lose([](const ObjectKey& key) {
    return key.kind == ObjectKind::kWindowPage && key.end == 1024;
  });
  Restart();
  EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 768u);
  disk_->set_lose([](const ObjectKey& key) { return key.end == 256; });
  Restart();
  EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
}

// What one tier lacks another one has, and the nearer gets it.
TEST_F(PrefixTiersTest, TiersCompleteEachOther) {
  const auto shared = std::make_shared<MemoryStore>("shared", true);
  tiers_ = {shared, disk_};
  Restart();
  const Ids first = Tokens(1300, 1);
  Publish(first, {1024});
  cache_->Flush();
  EXPECT_EQ(shared->stats().entries, disk_->stats().entries);
  const std::vector<ObjectKey> keys = shared->keys();
  for (const ObjectKey& key : keys) {
    if (key.end == 512 || key.kind == ObjectKind::kResume) {
      shared->Remove({&key, 1});
    }
  }
  Restart();
  const PrefixHit hit = GoOn(Join(first, Tokens(20, 2)));
  EXPECT_EQ(hit.total(), 1024u);
  EXPECT_EQ(hit.disk, 256u);
  EXPECT_EQ(hit.shared, 768u);
  cache_->Flush();
  disk_->Clear(nullptr);
  Restart();
  EXPECT_EQ(GoOn(Join(first, Tokens(20, 2))).shared, 1024u);
}

TEST_F(PrefixTiersTest, OneQuestionForAConversationOfManyTurns) {
  Ids chat;
  for (uint32_t turn = 0; turn < 64; ++turn) {
    chat = Join(chat, Join(Tokens(40, turn), {1}));
  }
  Publish(chat);
  cache_->Flush();
  Restart();
  const size_t before = disk_->questions();
  const auto begin = std::chrono::steady_clock::now();
  const auto cache = MakeConversation(Join(chat, Tokens(20, 99)));
  WaitFor(*Ask(*cache));
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  RecordProperty("seconds", std::to_string(took.count()));
  EXPECT_EQ(disk_->questions(), before + 1);
  EXPECT_EQ(GoOn(Join(chat, Tokens(20, 99))).total(), chat.size() - 1);
}

TEST_F(PrefixTiersTest, WhatIsQuickerToComputeIsComputed) {
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  disk_->set_delay(milliseconds(20));
  seconds_ = 1e-6;
  Restart();
  const auto cache = MakeConversation(Join(first, {5, 6}));
  const auto fetch = Ask(*cache);
  WaitFor(*fetch);
  EXPECT_TRUE(fetch->cheaper());
  EXPECT_TRUE(fetch->Take().pages.empty());
  EXPECT_EQ(cache_->stats().loader.cheaper, 1u);
  seconds_ = 1;
  view_->set_seconds_per_token(1);
  EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 512u);
}

TEST_F(PrefixTiersTest, ADeadTierIsLeftAndNotAskedAgain) {
  options_.time_out = milliseconds(2000);
  const auto remote = std::make_shared<MemoryStore>("remote");
  tiers_ = {disk_, remote};
  Restart();
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  Restart();
  remote->Hang();
  const auto cache = MakeConversation(Join(first, {5, 6}));
  const auto fetch = Ask(*cache);
  // The disk has answered then, however long that took.
  while (remote->hanging() == 0) std::this_thread::yield();
  fetch->Wait();
  EXPECT_FALSE(fetch->pending());
  EXPECT_FALSE(fetch->done());
  cache_->loader()->TimedOut(*fetch);
  EXPECT_EQ(cache_->stats().loader.tiers[1].timeouts, 1u);
  for (uint32_t i = 0; i < 6; ++i) {
    EXPECT_EQ(GoOn(Join(first, Tokens(9, i))).total(), 512u);
  }
  EXPECT_EQ(remote->hanging(), 1u);
  remote->Release();
}

TEST_F(PrefixTiersTest, AFullPoolTakesBackWhatWasFetched) {
  pool_ = BlockPool::Create(size_t{2} << 20);
  const Ids first = Tokens(1600, 1);
  Publish(first, {1536});
  cache_->Flush();
  Restart();
  const auto cache = MakeConversation(Join(first, {5, 6}));
  const auto fetch = Ask(*cache);
  WaitFor(*fetch);
  EXPECT_TRUE(fetch->done());
  EXPECT_GT(pool_->blocks_in_use(), 0u);
  const size_t room = pool_->budget_bytes() / (2 * 32 * 2) - 800;
  const auto large = MakeConversation(Tokens(room, 99));
  EXPECT_NO_THROW(FillByTokens(*large, large->length()));
  EXPECT_TRUE(fetch->Take().pages.empty());
}

TEST_F(PrefixTiersTest, ClearedIsForgotten) {
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  cache_->Clear(PrefixTier::kRam);
  EXPECT_EQ(GoOn(Join(first, {5, 6})).disk, 512u);
  cache_->Clear(PrefixTier::kDisk);
  EXPECT_EQ(GoOn(Join(first, {5, 6})).ram, 512u);
  EXPECT_THROW(cache_->Clear(PrefixTier::kRemote), InvalidArgument);
  Publish(first, {300});
  cache_->Clear();
  EXPECT_EQ(disk_->stats().entries, 0u);
  EXPECT_EQ(GoOn(Join(first, {5, 6})).total(), 0u);
}

TEST_F(PrefixTiersTest, WhatIsNotClearedIsSaid) {
  const Ids first = Tokens(700, 1);
  Publish(first, {512});
  cache_->Flush();
  disk_->set_fail_writes(true);
  const auto error = [&](auto&&... arguments) -> std::string {
    try {
      cache_->Clear(arguments...);
    } catch (const Error& found) {
      return found.what();
    }
    return "";
  };
  EXPECT_EQ(error(), "prefix cache: not all is cleared: disk failed");
  EXPECT_EQ(error(PrefixTier::kDisk),
            "prefix cache: not all is cleared: disk failed");
  disk_->set_fail_writes(false);
  EXPECT_GT(disk_->stats().entries, 0u);
  disk_->Hang();
  const std::string late =
      "prefix cache: not all is cleared: disk has not answered in time, and "
      "may go on with it";
  // More of them than threads are left behind with a tier that hangs.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(i % 2 == 0 ? error(milliseconds(1))
                         : error(PrefixTier::kDisk, milliseconds(1)),
              late);
  }
  while (disk_->hanging() < 16) std::this_thread::yield();
  EXPECT_EQ(cache_->stats().ram.pages, 0u);
  disk_->Release();
  while (disk_->hanging() > 0) std::this_thread::yield();
  while (!error().empty()) std::this_thread::yield();
  EXPECT_EQ(disk_->stats().entries, 0u);
  // A write that hangs.
  Publish(first, {512});
  disk_->Hang();
  Publish(Tokens(700, 2), {512});
  while (disk_->hanging() == 0) std::this_thread::yield();
  EXPECT_EQ(error(milliseconds(1)), late);
  disk_->Release();
  EXPECT_TRUE(cache_->Flush());
}

// More often than threads may be left in tiers that do not answer.
TEST_F(PrefixTiersTest, WhatNoThreadCouldClearIsClearedLater) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    Restart();  // tiers belong to the process that made them
    const auto clears = [&] {
      try {
        cache_->Clear(PrefixTier::kDisk);
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    bool right = true;
    {
      const NoThreads none;
      for (int i = 0; i < 20; ++i) right = right && !clears();
    }
    _exit(right && clears() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(PrefixTiersTest, ClosedItWritesTheRestAndIsRamAlone) {
  const Ids first = Tokens(700, 1);
  disk_->set_delay(milliseconds(5));
  Publish(first, {512});
  cache_->Close();
  disk_->set_delay(milliseconds(0));
  const size_t entries = disk_->stats().entries;
  EXPECT_GT(entries, 3u);
  Publish(Tokens(700, 2), {512});
  cache_->Flush();
  EXPECT_EQ(disk_->stats().entries, entries);
  const auto cache = MakeConversation(Join(Tokens(700, 3), {5, 6}));
  EXPECT_EQ(Ask(*cache), nullptr);
  EXPECT_GT(GoOn(Join(first, {5, 6})).ram, 0u);
}

TEST_F(PrefixTiersTest, ATierThatHangsIsLeft) {
  Publish(Tokens(700, 1));
  cache_->Flush();
  disk_->Hang();
  for (uint32_t seed = 2; seed < 5; ++seed) Publish(Tokens(700, seed));
  const auto cache = MakeConversation(Join(Tokens(700, 1), Tokens(9, 9)));
  cache_->Clear(PrefixTier::kRam);
  const auto fetch = Ask(*cache);
  while (disk_->hanging() < 2) std::this_thread::yield();
  EXPECT_FALSE(cache_->Flush(milliseconds(5)));
  EXPECT_EQ(cache_->stats().writer.queued, 2 * 3u);
  // Two pages and a point of each.
  EXPECT_EQ(cache_->Close(milliseconds(5)), 3 * 3u);
  EXPECT_EQ(cache_->Close(), 0u);
  EXPECT_EQ(cache_->stats().writer.dropped, 3 * 3u);
  EXPECT_EQ(cache_->stats().writer.queued, 0u);
  EXPECT_TRUE(cache_->Flush());
  // RAM is as it was, and blocks of what was queued are free.
  const auto before = MakeConversation(Tokens(600, 8));
  FillByTokens(*before, 599);
  view_->Publish(*before, {}, true);
  EXPECT_EQ(GoOn(Join(Tokens(600, 8), Tokens(9, 9))).ram, 599u);
  cache_->Clear(PrefixTier::kRam);
  EXPECT_EQ(pool_->bytes_in_use(), before->nbytes());
  // The threads come back to a cache that is gone.
  const std::weak_ptr<PrefixCache> gone = cache_;
  view_.reset();
  cache_.reset();
  EXPECT_TRUE(gone.expired());
  const size_t written = disk_->stats().writes;
  disk_->Release();
  while (disk_->hanging() > 0) std::this_thread::yield();
  while (disk_.use_count() > 2) std::this_thread::yield();
  EXPECT_LE(disk_->stats().writes, written + 1);
  EXPECT_TRUE(fetch->Take().points.empty());
}

// Threads publish, fetch and write while the process is copied.
TEST_F(PrefixTiersTest, AChildOfForkHasRamAlone) {
  if (kSanitized) {
    GTEST_SKIP() << "a sanitizer's allocator may be locked in the child for "
                    "ever, by a thread that it does not have";
  }
  const Ids known = Tokens(600, 1);
  Publish(known);
  cache_->Flush();
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t seed = 100 * (t + 1); !stop; ++seed) {
        const Ids tokens = Tokens(300, seed % 7);
        const auto cache = MakeConversation(tokens);
        if (const auto fetch = Ask(*cache)) fetch->Wait();
        const auto points = FillByTokens(*cache, 299);
        view_->Publish(*cache, points, true);
        if (seed % 5 == 0) cache_->Clear(PrefixTier::kDisk);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);
      bool right = cache_->writer() == nullptr && cache_->loader() == nullptr;
      const size_t writes = cache_->stats().writer.written;
      right = right && cache_->stats().tiers.empty() && writes == 0;
      right = right && GoOn(Join(known, Tokens(20, 2))).ram == 599;
      Publish(Tokens(500, 50 + i));
      right = right && GoOn(Join(Tokens(500, 50 + i), {5})).ram == 499;
      cache_->index().Reclaim(pool_.get(), size_t{1} << 40);
      cache_->index().GiveUp(pool_.get());
      right = right && cache_->Flush() && cache_->Close() == 0;
      for (const bool all : {false, true}) {
        try {
          all ? cache_->Clear() : cache_->Clear(PrefixTier::kDisk);
          right = false;
        } catch (const Error&) {
        }
      }
      try {
        cache_->RemoveBranch({});
        right = false;
      } catch (const Error&) {
      }
      cache_->Clear(PrefixTier::kRam);
      view_.reset();
      cache_.reset();
      _exit(right && !HasFailure() ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << i;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(PrefixTiersTest, TiersAreOfDifferentKindsThatThereAre) {
  const auto make = [](PrefixTiers tiers) {
    return std::make_shared<PrefixCache>(1, std::move(tiers));
  };
  EXPECT_THROW(make({std::make_shared<MemoryStore>("tape")}), InvalidArgument);
  EXPECT_THROW(make({std::make_shared<MemoryStore>("ram")}), InvalidArgument);
  EXPECT_THROW(make({disk_, disk_}), InvalidArgument);
}

// Threads that publish, ask, go on, flush, clear, with a tier that loses and
// damages some, in a pool that is full: nothing but what a cold one has.
TEST_F(PrefixTiersTest, ManyThreadsAndATierThatFails) {
  layers_ = HybridLayers();
  ram_bytes_ = size_t{1} << 20;
  pool_ = BlockPool::Create(size_t{12} << 20);
  tiers_ = {std::make_shared<MemoryStore>("shared", true), disk_};
  std::atomic<uint32_t> count = 0;
  disk_->set_lose([&](const ObjectKey&) { return count++ % 19 == 0; });
  disk_->set_change([&](const ObjectKey&, AlignedBuffer<uint8_t>& bytes) {
    if (count++ % 17 == 0) bytes.data()[bytes.size() / 2] ^= 1;
  });
  Restart();
  std::atomic<size_t> below = 0;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (size_t i = 0; i < 25; ++i) {
        const Ids tokens =
            Join(Tokens(600, rng() % 4), Tokens(1 + rng() % 300, rng() % 3));
        Publish(tokens, {256, 512});
        if (rng() % 4 == 0) cache_->Flush();
        if (rng() % 2 == 0) cache_->Clear(PrefixTier::kRam);
        const PrefixHit hit =
            GoOn(Join(tokens, Tokens(9, 7)), 16u << (rng() % 4));
        below += hit.shared + hit.disk;
        if (rng() % 16 == 0) cache_->Clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(below.load(), 0u);
  view_.reset();
  cache_.reset();
  EXPECT_EQ(pool_->blocks_in_use(), 0u);
}

// What is in a folder, by kind and end; all of it hangs on something.
std::multiset<std::pair<ObjectKind, uint64_t>> InFolder(
    const std::string& path) {
  const auto folder = Folder::Open(path, false);
  const FolderContent content = ReadFolder(*folder);
  std::set<ObjectName> there;
  for (const FolderEntry& entry : content.entries) {
    there.insert(entry.name.name);
  }
  std::multiset<std::pair<ObjectKind, uint64_t>> all;
  for (const FolderEntry& entry : content.entries) {
    EXPECT_TRUE(!entry.name.HangsOnObject() ||
                there.contains(entry.name.parent));
    all.insert({entry.name.kind, entry.name.end});
  }
  return all;
}

TEST_F(PrefixTiersTest, ABranchGoesAndWhatOthersShareStays) {
  const std::vector<KvLayerSpec> no_pages = {
      {.kind = LayerKind::kRecurrent, .lru_width = 5, .conv_tail = 3},
      {LayerKind::kSliding, 2, 32, 300}};
  for (const auto& layers :
       {FullLayers(), SlidingLayers(), HybridLayers(), no_pages}) {
    for (const size_t shared : {0, 40, 256, 700}) {
      layers_ = layers;
      const TempFolder above;
      const auto use = [&](const std::string& path) {
        tiers_ = {OpenFolderStore(path, {"disk", false, uint64_t{1} << 30})};
        Restart();
      };
      const Ids begin = Tokens(shared, 1);
      const Ids kept = Join(begin, Join({1}, Tokens(400, 2)));
      const Ids gone = Join(begin, Join({2}, Tokens(700, 3)));
      const size_t last = (kept.size() - 1) / kPageTokens * kPageTokens;
      use(above / "expected");
      Publish(kept, {shared + 30, last});
      cache_->Flush();
      const auto expected = InFolder(above / "expected");
      use(above / "cache");
      Publish(kept, {shared + 30, last});
      Publish(gone, {shared + 2, shared + 300});
      // Begins as that and goes on otherwise, soon, at the root of a page, and
      // behind others.
      for (const size_t at : {shared + 3, size_t{512}, gone.size() - 4}) {
        if (at <= shared) continue;
        Publish(Join({gone.begin(), gone.begin() + static_cast<ptrdiff_t>(at)},
                     Tokens(30, 5)));
      }
      const auto other = View("another");
      Publish(gone, {}, other.get());
      cache_->Flush();
      const auto before = InFolder(above / "cache");
      const auto like = MakeConversation(gone);
      const KvLayout& layout = like->layout();
      EXPECT_EQ(view_->Remove(layout, kept, kept.size()), 0u);
      EXPECT_EQ(InFolder(above / "cache"), before);
      EXPECT_GT(view_->Remove(layout, gone, shared), 0u);
      EXPECT_EQ(view_->Remove(layout, gone, shared), 0u) << "it is gone";
      Restart();
      const size_t hit = GoOn(Join(kept, Tokens(9, 9))).disk;
      EXPECT_GE(hit, last);
      EXPECT_LE(GoOn(Join(gone, Tokens(9, 9))).total(), shared + 1);
      EXPECT_GT(View("another")->Remove(layout, gone, 0), 0u);
      EXPECT_EQ(InFolder(above / "cache"), expected);
    }
  }
}

}  // namespace
}  // namespace gkv
