#include "store/remote_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/blake2b.h"
#include "store/eventually.h"
#include "store/fake_client.h"

namespace gkv {
namespace {

using namespace std::chrono_literals;
using Bytes = FakeClient::Bytes;

constexpr size_t kSignedHeader = 56;
constexpr size_t kPlainHeader = 24;

ObjectKey Key(uint8_t n, uint8_t salt = 0) {
  ObjectKey key;
  key.address.bytes[0] = n;
  key.address.bytes[31] = 1;
  key.end = 256;
  key.salt.bytes[5] = salt;
  return key;
}

StoredBytes Object(size_t size, uint32_t seed) {
  auto buffer = std::make_shared<AlignedBuffer<uint8_t>>(size);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    std::memcpy(buffer->data() + i, &word, std::min<size_t>(8, size - i));
  }
  return {{buffer->data(), size}, buffer};
}

Bytes Copy(const StoredBytes& object) {
  return {object.bytes.begin(), object.bytes.end()};
}

RemoteOptions Options(bool with_secret = true) {
  RemoteOptions options;
  if (with_secret) options.secret = {1, 2, 3, 4};
  options.calls.timeout = 20s;
  options.calls.first_backoff = 20ms;
  return options;
}

Loaded LoadOne(BlockStore& store, const ObjectKey& key) {
  std::vector<Loaded> loaded = store.Load(std::span(&key, 1));
  EXPECT_EQ(loaded.size(), 1u);
  return loaded.at(0);
}

bool Has(BlockStore& store, const ObjectKey& key) {
  uint8_t found = 7;
  store.Has(std::span(&key, 1), std::span(&found, 1));
  return found == 1;
}

void ExpectHit(BlockStore& store, const ObjectKey& key, const Bytes& bytes) {
  const Loaded loaded = LoadOne(store, key);
  ASSERT_EQ(loaded.state, LoadState::kHit);
  EXPECT_EQ(Copy(loaded.object), bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(loaded.object.bytes.data()) % 64, 0u);
  EXPECT_FALSE(loaded.object.mapped);
}

struct Fixture {
  explicit Fixture(const RemoteOptions& options = Options())
      : client(std::make_shared<FakeClient>()),
        store(MakeRemoteStore(client, options)) {}
  std::shared_ptr<FakeClient> client;
  std::shared_ptr<RemoteStore> store;
};

class SignedOrNot : public testing::TestWithParam<bool> {
 protected:
  Fixture f{Options(GetParam())};
  size_t header = GetParam() ? kSignedHeader : kPlainHeader;
};
INSTANTIATE_TEST_SUITE_P(RemoteStoreTest, SignedOrNot, testing::Bool());

TEST_P(SignedOrNot, WhatIsPutIsLoaded) {
  uint8_t n = 0;
  for (const size_t size :
       {size_t{1}, size_t{192}, size_t{1000001}, kRemoteChunkBytes - header,
        kRemoteChunkBytes - header + 1, kRemoteChunkBytes,
        2 * kRemoteChunkBytes - header, 2 * kRemoteChunkBytes,
        9 * kRemoteChunkBytes + 5}) {
    const ObjectKey key = Key(++n);
    const StoredBytes object = Object(size, n);
    EXPECT_FALSE(Has(*f.store, key));
    EXPECT_EQ(LoadOne(*f.store, key).state, LoadState::kMiss);
    f.client->written.clear();
    f.store->Put(key, object);
    EXPECT_TRUE(Has(*f.store, key));
    const size_t chunks =
        (header + size + kRemoteChunkBytes - 1) / kRemoteChunkBytes;
    ASSERT_EQ(f.client->written.size(), chunks);
    const std::string& last = f.client->written.back();  // KEY itself
    EXPECT_EQ(last.size(), 5 + 16 + 1 + 32u);
    EXPECT_TRUE(last.starts_with("gkv1:"));
    EXPECT_EQ(f.client->written.front(), chunks > 1 ? last + ":1" : last);
    ExpectHit(*f.store, key, Copy(object));
  }
  const StoreStats stats = f.store->stats();
  EXPECT_EQ(stats.writes, 9u);
  EXPECT_EQ(stats.hits, 9u);
  EXPECT_EQ(stats.misses, 9u);
  EXPECT_EQ(stats.damaged + stats.failed_writes, 0u);
  EXPECT_EQ(f.store->tier(), "remote");
}

TEST_P(SignedOrNot, ManyAtOnceSomeMissing) {
  std::vector<ObjectKey> keys;
  for (uint8_t n = 0; n < 60; ++n) {
    keys.push_back(Key(n));
    if (n % 3 == 0) continue;
    f.store->Put(keys[n],
                 Object(n % 7 == 1 ? kRemoteChunkBytes + n : 1000u + n, n));
  }
  std::vector<uint8_t> found(keys.size(), 9);
  f.store->Has(keys, found);
  const std::vector<Loaded> loaded = f.store->Load(keys);
  for (uint8_t n = 0; n < 60; ++n) {
    EXPECT_EQ(found[n], n % 3 != 0);
    EXPECT_EQ(loaded[n].state, n % 3 == 0 ? LoadState::kMiss : LoadState::kHit);
    if (n % 3 == 0) continue;
    EXPECT_EQ(Copy(loaded[n].object),
              Copy(Object(n % 7 == 1 ? kRemoteChunkBytes + n : 1000u + n, n)));
  }
  EXPECT_TRUE(f.store->Load({}).empty());
  f.store->Has({}, {});
}

// Nothing of the header, nor the length, may differ; with a signature nothing
// at all.
TEST_P(SignedOrNot, EveryDamagedByteOfTheHeaderIsAMiss) {
  const StoredBytes object = Object(300, 1);
  f.store->Put(Key(1), object);
  const Bytes sound = f.client->First();
  uint64_t damaged = 0;
  for (size_t at = 0; at < header; ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      f.client->First() = sound;
      f.client->First()[at] ^= flip;
      EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << at;
      EXPECT_EQ(f.store->stats().damaged, ++damaged);
    }
  }
  f.client->First() = sound;
  ExpectHit(*f.store, Key(1), Copy(object));
}

TEST_P(SignedOrNot, CutAtEveryLengthIsAMiss) {
  f.store->Put(Key(1), Object(300, 1));
  const Bytes sound = f.client->First();
  for (size_t size = 0; size < sound.size(); ++size) {
    f.client->First().assign(sound.begin(),
                             sound.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << size;
  }
  f.client->First() = sound;
  f.client->First().push_back(0);
  EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
}

TEST_P(SignedOrNot, GarbageIsAMiss) {
  f.store->Put(Key(1), Object(300, 1));
  std::mt19937 random(3);
  for (const size_t size : {0u, 1u, 8u, 24u, 56u, 100u, 10000u}) {
    Bytes& value = f.client->First();
    value.resize(size);
    for (uint8_t& byte : value) byte = static_cast<uint8_t>(random());
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
  }
  EXPECT_EQ(f.store->stats().damaged, 7u);
  EXPECT_EQ(f.store->call_stats().failures, 0u);
}

// Sizes that would overflow, or that no object has, reserve nothing.
TEST_P(SignedOrNot, AbsurdSizesAreMisses) {
  const size_t big = kRemoteChunkBytes + 100;
  f.store->Put(Key(1), Object(big, 1));
  for (const uint64_t size :
       {uint64_t{0}, UINT64_MAX, UINT64_MAX - header, UINT64_MAX - header + 1,
        uint64_t{1} << 62, (uint64_t{1} << 30) + 1, uint64_t{1} << 30,
        uint64_t{big} + 1, uint64_t{big} - 1}) {
    std::memcpy(f.client->First().data() + 16, &size, sizeof(size));
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << size;
  }
  EXPECT_EQ(f.store->call_stats().failures, 0u);
}

TEST_P(SignedOrNot, AChunkThatIsMissingOrOfAnotherLengthIsAMiss) {
  const StoredBytes object = Object(3 * kRemoteChunkBytes + 77, 1);
  f.store->Put(Key(1), object);
  const auto sound = f.client->stored;
  ASSERT_EQ(sound.size(), 4u);
  for (const auto& [key, value] : sound) {
    const bool first = &value == &sound.begin()->second;
    f.client->stored = sound;
    f.client->stored.erase(key);
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << key;
    for (const int change : {-1, 1}) {
      f.client->stored = sound;
      f.client->stored[key].resize(value.size() + static_cast<size_t>(change));
      EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << key;
    }
    f.client->stored = sound;
    f.client->stored[key].clear();
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << key;
    // Written again, although KEY is there.
    f.client->stored = sound;
    f.client->stored.erase(key);
    (void)LoadOne(*f.store, Key(1));
    f.store->Put(Key(1), object);
    EXPECT_EQ(f.client->stored, sound) << first;
    ExpectHit(*f.store, Key(1), Copy(object));
  }
}

TEST_P(SignedOrNot, WhatIsThereIsNotWrittenAgainUnlessItIsDamaged) {
  const StoredBytes object = Object(kRemoteChunkBytes + 1, 1);
  f.store->Put(Key(1), object);
  f.store->Put(Key(1), object);
  EXPECT_EQ(f.client->written.size(), 2u);
  EXPECT_EQ(f.store->stats().writes, 1u);
  f.store->Damaged(Key(1));  // the reader says so
  f.store->Put(Key(1), object);
  EXPECT_EQ(f.client->written.size(), 4u);
  f.store->Put(Key(1), object);
  EXPECT_EQ(f.client->written.size(), 4u);
  f.client->First()[0] ^= 1;
  EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
  f.store->Put(Key(1), object);
  ExpectHit(*f.store, Key(1), Copy(object));
}

TEST_P(SignedOrNot, RemoveAndClear) {
  for (uint8_t n = 0; n < 6; ++n) {
    f.store->Put(Key(n, n % 2), Object(n * kRemoteChunkBytes + 9, n));
  }
  const std::vector<ObjectKey> keys = {Key(0), Key(5, 1), Key(99)};
  f.store->Remove(keys);
  EXPECT_FALSE(Has(*f.store, Key(0)));
  EXPECT_FALSE(Has(*f.store, Key(5, 1)));
  EXPECT_TRUE(Has(*f.store, Key(2)));
  EXPECT_EQ(f.client->stored.size(), 2u + 3 + 4 + 5);  // chunks went, too
  const Address salt = Key(0, 1).salt;
  EXPECT_EQ(f.store->Clear(&salt), Cleared::kAll);
  EXPECT_FALSE(Has(*f.store, Key(1, 1)));
  EXPECT_TRUE(Has(*f.store, Key(2)));
  f.client->stored["another's"] = {1};
  EXPECT_EQ(f.store->Clear(nullptr), Cleared::kAll);
  EXPECT_EQ(f.client->stored.size(), 1u);
  f.store->Flush();
}

TEST(RemoteStoreTest, AnyFlippedBitOfASignedValueIsAMiss) {
  Fixture f;
  f.store->Put(Key(1), Object(200, 1));
  const Bytes sound = f.client->First();
  for (size_t bit = 0; bit < sound.size() * 8; ++bit) {
    f.client->First() = sound;
    f.client->First()[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << bit;
  }
}

TEST(RemoteStoreTest, AFlippedBitOfAnyChunkIsAMiss) {
  Fixture f;
  f.store->Put(Key(1), Object(2 * kRemoteChunkBytes + 9, 1));
  for (auto& [key, value] : f.client->stored) {
    value.back() ^= 4;
    EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss) << key;
    value.back() ^= 4;
  }
  EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kHit);
}

// Another name's value is signed for that name.
TEST(RemoteStoreTest, ASignedValueUnderAnotherNameIsAMiss) {
  Fixture f;
  f.store->Put(Key(1), Object(200, 1));
  const Bytes other = f.client->First();
  f.client->stored.clear();
  f.store->Put(Key(2), Object(200, 2));
  f.client->First() = other;
  EXPECT_EQ(LoadOne(*f.store, Key(2)).state, LoadState::kMiss);
}

// An old value of the same name has the same content: it is right.
TEST(RemoteStoreTest, AReplayedValueIsRight) {
  Fixture f;
  const StoredBytes object = Object(200, 1);
  f.store->Put(Key(1), object);
  const auto old = f.client->stored;
  f.store->Damaged(Key(1));
  f.store->Put(Key(1), object);
  EXPECT_EQ(f.client->stored, old);
  ExpectHit(*f.store, Key(1), Copy(object));
}

// Chunks of two sound values of one size, put together.
TEST(RemoteStoreTest, ChunksOfAnotherValueAreAMiss) {
  Fixture f;
  f.store->Put(Key(1), Object(kRemoteChunkBytes + 100, 1));
  const Bytes tail = f.client->stored.rbegin()->second;
  f.client->stored.clear();
  f.store->Put(Key(2), Object(kRemoteChunkBytes + 100, 2));
  f.client->stored.rbegin()->second = tail;
  EXPECT_EQ(LoadOne(*f.store, Key(2)).state, LoadState::kMiss);
}

TEST(RemoteStoreTest, OverwrittenWhileItIsRead) {
  Fixture f;
  const StoredBytes object = Object(2 * kRemoteChunkBytes, 1);
  f.store->Put(Key(1), object);
  const auto sound = f.client->stored;
  f.client->after_get = [&] {
    const std::lock_guard lock(f.client->mutex);
    for (auto& [key, value] : f.client->stored) value[value.size() / 2] ^= 1;
  };
  EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
  // By what it should be: a hit.
  f.client->stored = sound;
  f.client->after_get = [&] {
    const std::lock_guard lock(f.client->mutex);
    f.client->stored = sound;
  };
  ExpectHit(*f.store, Key(1), Copy(object));
}

TEST(RemoteStoreTest, OtherSecretsFindNothing) {
  const auto client = std::make_shared<FakeClient>();
  RemoteOptions other = Options();
  other.secret = {1, 2, 3, 5};
  const auto ours = MakeRemoteStore(client, Options());
  const auto theirs = MakeRemoteStore(client, other);
  const auto plain = MakeRemoteStore(client, Options(false));
  ours->Put(Key(1), Object(100, 1));
  for (const auto& store : {theirs, plain}) {
    EXPECT_FALSE(Has(*store, Key(1)));
    EXPECT_EQ(LoadOne(*store, Key(1)).state, LoadState::kMiss);
  }
  // Under each other's names as well.
  const Bytes value = client->First();
  client->stored.clear();
  theirs->Put(Key(1), Object(100, 1));
  client->First() = value;
  EXPECT_EQ(LoadOne(*theirs, Key(1)).state, LoadState::kMiss);
  client->stored.clear();
  plain->Put(Key(1), Object(100, 1));
  const Bytes unsigned_value = client->First();
  client->First() = value;
  EXPECT_EQ(LoadOne(*plain, Key(1)).state, LoadState::kMiss);
  client->stored.clear();
  ours->Put(Key(1), Object(100, 1));
  client->First() = unsigned_value;  // what a liar without the secret can do
  EXPECT_EQ(LoadOne(*ours, Key(1)).state, LoadState::kMiss);
}

// Computed by hand from the description of the format.
TEST(RemoteStoreTest, BytesAreThoseOfTheFormat) {
  Fixture f;
  const StoredBytes object = Object(100, 1);
  f.store->Put(Key(1), object);
  const auto hash = [](size_t size, std::span<const uint8_t> key,
                       std::initializer_list<std::span<const uint8_t>> parts) {
    Blake2b blake(size, key);
    for (const auto part : parts) blake.Update(part);
    Bytes digest(size);
    blake.Finish(digest);
    return digest;
  };
  const auto text = [](std::string_view t) { return AsBytes(t); };
  const Bytes secret = Options().secret;
  const Bytes name_key = hash(32, {}, {text("gkv name"), secret});
  const Bytes sign_key = hash(32, {}, {text("gkv key"), secret});
  const Bytes name = hash(16, name_key, {Key(1).address.bytes});
  const Bytes salt = hash(16, name_key, {Key(1).salt.bytes});
  const auto hex = [](const Bytes& bytes) {
    std::string out;
    for (const uint8_t byte : bytes) {
      out += "0123456789abcdef"[byte >> 4];
      out += "0123456789abcdef"[byte & 15];
    }
    return out;
  };
  EXPECT_EQ(f.client->stored.begin()->first,
            "gkv1:" + hex(salt).substr(0, 16) + ":" + hex(name));
  Bytes expected;
  const auto add = [&](std::span<const uint8_t> bytes) {
    expected.insert(expected.end(), bytes.begin(), bytes.end());
  };
  add(text("GKVVALUE"));
  add(Bytes{1, 0, 0, 0, 1, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0});
  add(hash(32, sign_key, {text("gkv sign"), name, object.bytes}));
  add(object.bytes);
  EXPECT_EQ(f.client->First(), expected);
}

TEST(RemoteStoreTest, AClientThatThrowsIsAMissAndAFailedWrite) {
  for (const std::string broken : {"get", "put", "has"}) {
    Fixture f;
    const StoredBytes object = Object(100, 1);
    if (broken != "put") f.store->Put(Key(1), object);
    f.client->before = [&](const std::string& call) {
      if (call == broken) throw std::runtime_error("broken " + call);
    };
    if (broken == "get") {
      EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
    } else if (broken == "has") {
      EXPECT_FALSE(Has(*f.store, Key(1)));
    } else {
      f.store->Put(Key(1), object);
      EXPECT_EQ(f.store->stats().failed_writes, 1u);
      EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
    }
    EXPECT_EQ(f.store->call_stats().failures, 1u);
    EXPECT_EQ(f.store->call_stats().last_error, "broken " + broken);
    f.client->before = nullptr;
    EXPECT_TRUE(Eventually([&] {
      f.store->Put(Key(1), object);
      return LoadOne(*f.store, Key(1)).state == LoadState::kHit;
    }));
  }
}

TEST(RemoteStoreTest, AWrongNumberOfResultsIsAFailure) {
  Fixture f;
  f.store->Put(Key(1), Object(100, 1));
  f.client->extra = 1;
  EXPECT_EQ(LoadOne(*f.store, Key(1)).state, LoadState::kMiss);
  EXPECT_TRUE(f.store->call_stats().reads_open);
  f.client->extra = 0;
  EXPECT_TRUE(Eventually([&] { return Has(*f.store, Key(1)); }));
  f.client->extra = 3;
  EXPECT_FALSE(Has(*f.store, Key(1)));
  EXPECT_EQ(f.store->call_stats().last_error,
            "the remote's client gave 4 results, expected 1");
}

TEST(RemoteStoreTest, ObjectsOfNoSizeThatIsStoredAreFailedWrites) {
  RemoteOptions options = Options();
  options.max_object_bytes = 1000;
  Fixture f(options);
  f.store->Put(Key(1), Object(1001, 1));
  f.store->Put(Key(1), StoredBytes{});
  EXPECT_EQ(f.store->stats().failed_writes, 2u);
  EXPECT_TRUE(f.client->stored.empty());
  EXPECT_FALSE(f.store->call_stats().writes_open);
}

// What was there by the time-out is given, the rest is missed, and the call
// that hangs touches nothing that is gone.
TEST(RemoteStoreTest, WhatIsLateIsDropped) {
  Fixture f;
  std::vector<ObjectKey> keys;
  for (uint8_t n = 0; n < 8; ++n) {
    keys.push_back(Key(n));
    f.store->Put(keys[n], Object(100, n));
  }
  RemoteOptions options = Options();
  options.calls.timeout = 10s;  // the first of them come by then
  // Nothing is tried again, however long this takes.
  options.calls.first_backoff = options.calls.longest_backoff = 24h;
  std::atomic<int> gets = 0, came_back = 0;
  std::atomic<bool> stay = true;
  f.client->before = [&](const std::string& call) {
    if (call != "get" || ++gets == 1) return;
    // The pause of a poll: it hangs until the test lets go.
    while (stay) std::this_thread::sleep_for(1ms);
    ++came_back;
  };
  f.store = MakeRemoteStore(f.client, options);
  const std::vector<Loaded> loaded = f.store->Load(keys);
  for (size_t n = 0; n < 8; ++n) {
    EXPECT_EQ(loaded[n].state == LoadState::kHit, n < 4) << n;
  }
  EXPECT_EQ(LoadOne(*f.store, keys[0]).state, LoadState::kMiss);
  EXPECT_FALSE(Has(*f.store, keys[0]));
  f.store->Put(Key(77), Object(10, 1));
  EXPECT_EQ(f.store->call_stats().timeouts, 1u) << "one, not four";
  EXPECT_EQ(f.store->stats().failed_writes, 1u);
  const auto client = f.client;
  f.store.reset();
  f.client.reset();
  stay = false;
  EXPECT_TRUE(Eventually([&] { return came_back == 1; }));
  EXPECT_TRUE(Eventually([&] { return client.use_count() == 1; }));
  EXPECT_EQ(Copy(loaded[0].object), Copy(Object(100, 0)));
}

TEST(RemoteStoreTest, ALatePutWritesNoKey) {
  RemoteOptions options = Options();
  options.calls.timeout = 10s;  // it has begun to write by then
  Fixture f(options);
  std::atomic<bool> stay = true, back = false;
  f.client->before = [&](const std::string& call) {
    if (call != "put") return;
    // The pause of a poll: it hangs until the test lets go.
    while (stay) std::this_thread::sleep_for(1ms);
    back = true;
  };
  auto object = Object(kRemoteChunkBytes + 100, 1);
  const std::weak_ptr<const void> owner = object.owner;
  f.store->Put(Key(1), std::move(object));
  EXPECT_EQ(f.store->stats().failed_writes, 1u);
  EXPECT_FALSE(owner.expired());  // its bytes are being written
  stay = false;
  EXPECT_TRUE(Eventually([&] { return f.store->call_stats().running == 0; }));
  EXPECT_TRUE(back);
  EXPECT_TRUE(owner.expired());
  EXPECT_EQ(f.client->stored.size(), 1u);  // the tail without its beginning
  EXPECT_TRUE(Eventually([&] {
    f.store->Put(Key(1), Object(kRemoteChunkBytes + 100, 1));
    return LoadOne(*f.store, Key(1)).state == LoadState::kHit;
  }));
}

TEST(RemoteStoreTest, ManyThreads) {
  Fixture f;
  std::vector<std::thread> threads;
  std::atomic<int> hits = 0;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < 60; ++i) {
        const auto n = static_cast<uint8_t>(random() % 16);
        switch (random() % 4) {
          case 0:
            f.store->Put(Key(n), Object(1000u + n, n));
            break;
          case 1: {
            const ObjectKey key = Key(n);
            f.store->Remove(std::span(&key, 1));
            break;
          }
          case 2:
            f.store->Clear(nullptr);
            break;
          default: {
            const Loaded loaded = LoadOne(*f.store, Key(n));
            if (loaded.state != LoadState::kHit) break;
            ++hits;
            EXPECT_EQ(Copy(loaded.object), Copy(Object(1000u + n, n)));
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const StoreStats stats = f.store->stats();
  EXPECT_EQ(stats.hits, static_cast<uint64_t>(hits.load()));
  EXPECT_EQ(stats.damaged, 0u);
}

}  // namespace
}  // namespace gkv
