#ifndef GEMMAKV_TESTS_STORE_BLOCK_STORE_CONFORMANCE_H_
#define GEMMAKV_TESTS_STORE_BLOCK_STORE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "store/block_store.h"
#include "store/chain_objects.h"

// What every tier does alike. A test of a tier includes this and says
//
//   INSTANTIATE_TEST_SUITE_P(Disk, BlockStoreConformance,
//                            testing::Values(ConformanceFactory(&MakeIt)));

namespace gkv {

// A store and what it keeps things in, empty and large enough for 1,000 objects
// of 32 kB.
class ConformanceTier {
 public:
  virtual ~ConformanceTier() = default;
  virtual BlockStore& store() = 0;
  // Closes the store; another one is on the same medium then.
  virtual void Reopen() = 0;
  // Changes one byte of what the medium holds of an object.
  virtual void Corrupt(const ObjectKey& key, size_t offset) = 0;
  // Whether it knows how much the medium holds.
  virtual bool counts() const { return true; }
  // Whether it takes a reader's word for what is damaged.
  virtual bool trusts() const { return false; }
};

using ConformanceFactory = std::function<std::unique_ptr<ConformanceTier>()>;

// Names of tests say nothing of its bytes.
inline void PrintTo(const ConformanceFactory&, std::ostream* out) {
  *out << "a tier";
}

class BlockStoreConformance
    : public testing::TestWithParam<ConformanceFactory> {
 protected:
  BlockStoreConformance() : tier_(GetParam()()) {}

  BlockStore& store() { return tier_->store(); }
  void PutAll(const std::vector<ChainObject>& chain) {
    for (const ChainObject& object : chain) {
      store().Put(object.key, object.bytes);
    }
    store().Flush();
  }
  static std::vector<ObjectKey> KeysOf(const std::vector<ChainObject>& chain) {
    std::vector<ObjectKey> keys;
    for (auto at = chain.rbegin(); at != chain.rend(); ++at) {
      keys.push_back(at->key);
    }
    return keys;  // leaf first
  }
  size_t CountOf(const std::vector<ObjectKey>& keys) {
    std::vector<uint8_t> found(keys.size(), 2);
    store().Has(keys, found);
    size_t count = 0;
    for (const uint8_t one : found) {
      EXPECT_LE(one, 1);
      count += one;
    }
    return count;
  }
  // Asks again where it cannot be had yet.
  static std::vector<Loaded> LoadAll(BlockStore& store,
                                     const std::vector<ObjectKey>& keys) {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (true) {
      std::vector<Loaded> loaded = store.Load(keys);
      EXPECT_EQ(loaded.size(), keys.size());
      const bool ready = std::none_of(
          loaded.begin(), loaded.end(),
          [](const Loaded& one) { return one.state == LoadState::kNotReady; });
      if (ready || std::chrono::steady_clock::now() > end) return loaded;
      // The pause of the poll: the store's threads run meanwhile.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Whether all of it is there, bit for bit.
  static void ExpectLoads(BlockStore& store,
                          const std::vector<ChainObject>& chain) {
    const auto loaded = LoadAll(store, KeysOf(chain));
    for (size_t i = 0; i < chain.size(); ++i) {
      const Loaded& one = loaded[chain.size() - 1 - i];
      ASSERT_EQ(one.state, LoadState::kHit) << i;
      EXPECT_TRUE(SameBytes(one.object.bytes, chain[i].bytes.bytes)) << i;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(one.object.bytes.data()) % 64, 0u);
      EXPECT_NE(one.object.owner, nullptr);
      EXPECT_NO_THROW(DecodeHead(one.object.bytes, ChainLayout()));
    }
  }
  static void ExpectMisses(BlockStore& store,
                           const std::vector<ObjectKey>& keys) {
    for (const Loaded& one : LoadAll(store, keys)) {
      EXPECT_EQ(one.state, LoadState::kMiss);
    }
  }

  // What it says that the medium holds.
  void ExpectEntries(size_t count) {
    EXPECT_EQ(store().stats().entries, tier_->counts() ? count : 0);
  }

  std::unique_ptr<ConformanceTier> tier_;
};

TEST_P(BlockStoreConformance, GivesWhatWasPut) {
  const auto chain = Chain("", 1, 5);
  EXPECT_FALSE(store().tier().empty());
  PutAll(chain);
  EXPECT_EQ(CountOf(KeysOf(chain)), chain.size());
  ExpectLoads(store(), chain);
  ExpectLoads(store(), chain);
}

TEST_P(BlockStoreConformance, AnotherStoreFindsItToo) {
  const auto chain = Chain("tenant", 1, 3);
  PutAll(chain);
  tier_->Reopen();
  EXPECT_EQ(CountOf(KeysOf(chain)), chain.size());
  ExpectLoads(store(), chain);
}

TEST_P(BlockStoreConformance, MissesWhatIsNotThere) {
  const auto there = Chain("", 1, 2);
  ExpectMisses(store(), KeysOf(there));
  EXPECT_EQ(CountOf(KeysOf(there)), 0u);
  PutAll(there);
  const auto other = KeysOf(Chain("", 2, 2));
  const auto tenant = KeysOf(Chain("tenant", 1, 2));
  for (const auto& keys : {other, tenant}) {
    ExpectMisses(store(), keys);
    EXPECT_EQ(CountOf(keys), 0u);
  }
  // Some of one question.
  auto mixed = other;
  mixed.push_back(there[0].key);
  std::vector<uint8_t> found(mixed.size());
  store().Has(mixed, found);
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(LoadAll(store(), mixed)[3].state, LoadState::kHit);
}

TEST_P(BlockStoreConformance, NothingIsAskedOfIt) {
  store().Has({}, {});
  EXPECT_TRUE(store().Load({}).empty());
  store().Remove({});
  store().Clear(nullptr);
  store().Flush();
  EXPECT_EQ(store().stats().entries, 0u);
}

TEST_P(BlockStoreConformance, PutTwiceIsOneObject) {
  const auto chain = Chain("", 3, 1);
  PutAll(chain);
  const StoreStats before = store().stats();
  PutAll(chain);
  const StoreStats after = store().stats();
  ExpectEntries(chain.size());
  EXPECT_EQ(after.bytes, before.bytes);
  EXPECT_EQ(after.failed_writes, 0u);
  ExpectLoads(store(), chain);
}

TEST_P(BlockStoreConformance, RemovedIsAMiss) {
  const auto chain = Chain("", 4, 3);
  PutAll(chain);
  const std::vector<ObjectKey> leaf{chain.back().key};
  store().Remove(leaf);
  store().Remove(leaf);
  store().Remove(KeysOf(Chain("", 5, 2)));  // never there
  ExpectMisses(store(), leaf);
  EXPECT_EQ(CountOf(KeysOf(chain)), chain.size() - 1);
  ExpectEntries(chain.size() - 1);
  PutAll(chain);
  ExpectLoads(store(), chain);
}

TEST_P(BlockStoreConformance, ClearsOneSaltOrAll) {
  const auto none = Chain("", 6, 2);
  const auto one = Chain("one", 6, 2);
  const auto two = Chain("two", 6, 2);
  for (const auto* chain : {&none, &one, &two}) PutAll(*chain);
  const Address salt = ChainSalt("one");
  store().Clear(&salt);
  ExpectMisses(store(), KeysOf(one));
  ExpectLoads(store(), none);
  ExpectLoads(store(), two);
  const Address empty{};
  store().Clear(&empty);
  ExpectMisses(store(), KeysOf(none));
  ExpectLoads(store(), two);
  store().Clear(nullptr);
  ExpectMisses(store(), KeysOf(two));
  EXPECT_EQ(store().stats().entries, 0u);
  EXPECT_EQ(store().stats().bytes, 0u);
}

// A reader never takes a damaged object for the right one, and what replaces it
// is found.
TEST_P(BlockStoreConformance, DamagedGoes) {
  const auto chain = Chain("", 7, 1);
  const size_t size = chain[0].bytes.bytes.size();
  for (const size_t offset : {size_t{0}, size_t{17}, size_t{40}, size_t{165},
                              size_t{200}, size / 2, size - 1}) {
    PutAll(chain);
    tier_->Corrupt(chain[0].key, offset);
    const std::vector<ObjectKey> key{chain[0].key};
    const Loaded loaded = LoadAll(store(), key)[0];
    if (loaded.state == LoadState::kHit) {
      EXPECT_THROW(DecodeHead(loaded.object.bytes, ChainLayout()), Error);
      EXPECT_FALSE(loaded.object.checked);
      store().Damaged(key[0]);
    }
    ExpectMisses(store(), key);
    EXPECT_EQ(CountOf(key), 0u) << offset;
    EXPECT_GE(store().stats().damaged, 1u);
    PutAll(chain);
    ExpectLoads(store(), chain);
  }
}

TEST_P(BlockStoreConformance, SoundStaysWhateverIsSaidOfIt) {
  const auto chain = Chain("", 8, 1);
  PutAll(chain);
  store().Damaged(chain[0].key);
  store().Damaged(Chain("", 9, 1)[0].key);  // not there
  const auto loaded = LoadAll(store(), {chain[0].key});
  // A tier that believes its reader may have removed it.
  if (loaded[0].state == LoadState::kHit) ExpectLoads(store(), chain);
}

TEST_P(BlockStoreConformance, ManyKeysInOneQuestion) {
  const auto chain = Chain("", 10, 511);
  PutAll(chain);
  const auto keys = KeysOf(chain);
  EXPECT_EQ(CountOf(keys), 512u);
  ExpectLoads(store(), chain);
  ExpectEntries(512);
}

TEST_P(BlockStoreConformance, BytesStayWithTheirOwner) {
  const auto chain = Chain("", 11, 2);
  PutAll(chain);
  const auto loaded = LoadAll(store(), KeysOf(chain));
  store().Clear(nullptr);
  tier_.reset();
  for (size_t i = 0; i < chain.size(); ++i) {
    EXPECT_TRUE(SameBytes(loaded[chain.size() - 1 - i].object.bytes,
                          chain[i].bytes.bytes));
  }
}

TEST_P(BlockStoreConformance, CountsWhatItDoes) {
  const auto chain = Chain("", 12, 3);
  PutAll(chain);
  LoadAll(store(), KeysOf(chain));
  LoadAll(store(), KeysOf(Chain("", 13, 1)));
  const StoreStats stats = store().stats();
  EXPECT_EQ(stats.writes, 4u);
  EXPECT_EQ(stats.hits, 4u);
  EXPECT_GE(stats.misses, 2u);
  ExpectEntries(4);
  size_t bytes = 0;
  for (const ChainObject& object : chain) bytes += object.bytes.bytes.size();
  if (!tier_->counts()) bytes = 0;
  EXPECT_GE(stats.bytes, bytes);
  EXPECT_LE(stats.bytes, bytes + 4 * 4096);
  EXPECT_EQ(stats.failed_writes, 0u);
  EXPECT_EQ(stats.damaged, 0u);
  EXPECT_EQ(stats.queued, 0u);
  EXPECT_FALSE(stats.paused);
}

// Threads that put, ask for, load, remove and clear the same few objects.
TEST_P(BlockStoreConformance, ThreadsAtOnce) {
  std::vector<ChainObject> objects;
  for (const char* salt : {"", "tenant"}) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
      for (auto& object : Chain(salt, seed, 2)) objects.push_back(object);
    }
  }
  std::atomic<size_t> wrong = 0, hits = 0;
  const auto work = [&](uint32_t seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 400; ++i) {
      const ChainObject& object = objects[random() % objects.size()];
      const std::vector<ObjectKey> key{object.key};
      const uint32_t what = random() % 100;
      if (what < 40) {
        store().Put(object.key, object.bytes);
      } else if (what < 85) {
        const Loaded loaded = store().Load(key)[0];
        if (loaded.state != LoadState::kHit) continue;
        ++hits;
        wrong += !SameBytes(loaded.object.bytes, object.bytes.bytes);
      } else if (what < 90) {
        std::vector<uint8_t> found(1);
        store().Has(key, found);
      } else if (what < 96) {
        store().Remove(key);
      } else if (what < 98) {
        store().Damaged(object.key);
        (void)store().stats();
      } else {
        store().Clear(&object.key.salt);
        store().Flush();
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(hits, 0u);
  if (!tier_->trusts()) {
    EXPECT_EQ(store().stats().damaged, 0u);
  }
  PutAll(objects);
  for (const ChainObject& object : objects) ExpectLoads(store(), {object});
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_BLOCK_STORE_CONFORMANCE_H_
