#include "cache/snapshot.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "cache/filled_cache.h"
#include "cache/kv_cache.h"

namespace gkv {
namespace {

TEST(SnapshotTest, RestoresIntoAnyBlockSize) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    for (const size_t length : {1, 2, 16, 17, 33, 150}) {
      const auto cache = Filled(dtype, 16, length);
      const std::vector<uint8_t> bytes = cache->ToBytes();
      for (const size_t block_tokens : {16, 32, 128}) {
        const auto restored =
            KVCache::FromBytes(bytes, {.block_tokens = block_tokens});
        // Ranges begin at block boundaries of the cache that was saved.
        ExpectSame(*cache, *restored);
        EXPECT_EQ(restored->ToBytes(), bytes);
      }
    }
  }
}

std::vector<uint8_t> Golden(const std::string& name) {
  std::ifstream file(std::string(GEMMAKV_TEST_DATA_DIR "/") + name,
                     std::ios::binary);
  EXPECT_TRUE(file) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

// Files of the past open for ever.
TEST(SnapshotTest, Version1FilesOpen) {
  const std::pair<const char*, KvDtype> files[] = {
      {"snapshot_v1_f32.kv", KvDtype::kF32},
      {"snapshot_v1_bf16.kv", KvDtype::kBF16},
      {"snapshot_v1_int8.kv", KvDtype::kInt8}};
  for (const auto& [name, dtype] : files) {
    const auto expected = Filled(dtype, 16, 50);
    for (const size_t block_tokens : {16, 64}) {
      ExpectSame(*expected, *KVCache::FromBytes(
                                Golden(name), {.block_tokens = block_tokens}));
    }
  }
  const auto lost = Filled(KvDtype::kBF16, 16, 50);
  lost->Truncate(25);
  ExpectSame(*lost, *KVCache::FromBytes(Golden("snapshot_v1_lost.kv"),
                                        {.block_tokens = 16}));
}

TEST(SnapshotTest, EmptyAndLostStatesRestore) {
  const KVCache empty(FilledLayout(KvDtype::kBF16, 16), {.capacity_tokens = 3},
                      "");
  const auto restored = KVCache::FromBytes(empty.ToBytes());
  EXPECT_EQ(restored->length(), 0u);
  EXPECT_EQ(restored->capacity_tokens(), 3u);
  const auto cache = Filled(KvDtype::kBF16, 16, 150);
  cache->Truncate(60);  // past the window: sliding layers hold nothing
  ExpectSame(*cache, *KVCache::FromBytes(cache->ToBytes()));
}

TEST(SnapshotTest, SizeIsAboutThatOfTheKeysAndValues) {
  const auto cache = Filled(KvDtype::kBF16, 64, 401);
  const size_t held = 400 * 64 * 2 * 2 + 20 * 2 * 32 * 2 * 2;
  const size_t slack = 79 * 2 * 32 * 2 * 2;  // a block and a group of sliding
  EXPECT_LT(cache->ToBytes().size(), held + slack + 401 * 4 + 400);
}

TEST(SnapshotTest, EveryFlippedBitIsNoticed) {
  const std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  std::vector<uint8_t> bad = bytes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const uint8_t bit = static_cast<uint8_t>(1u << (i % 8));
    bad[i] ^= bit;
    EXPECT_THROW(KVCache::FromBytes(bad), Error) << "byte " << i;
    bad[i] ^= bit;
  }
  EXPECT_NO_THROW(KVCache::FromBytes(bad));
}

TEST(SnapshotTest, EveryTruncationAndExtensionIsNoticed) {
  std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  for (size_t size = 0; size < bytes.size(); size += size < 300 ? 1 : 97) {
    EXPECT_THROW(KVCache::FromBytes(std::span(bytes).first(size)), CorruptFile)
        << size;
  }
  bytes.push_back(0);
  EXPECT_THROW(KVCache::FromBytes(bytes), CorruptFile);
}

TEST(SnapshotTest, ALaterVersionIsAMismatch) {
  std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  bytes[8] = 2;
  EXPECT_THROW(KVCache::FromBytes(bytes), Mismatch);
  bytes[8] = 0;
  EXPECT_THROW(KVCache::FromBytes(bytes), CorruptFile);
}

// Counts with a right checksum, as an attacker would write them.
TEST(SnapshotTest, AbsurdCountsWithARightChecksumAreRefused) {
  const std::vector<uint8_t> good = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  // magic, version, dtype, total, fingerprint, then five counts; then name
  // size and number of layers.
  const size_t counts = 8 + 4 + 4 + 8 + 16;
  const size_t header =
      counts + 5 * 8 + 2 * 4 + std::strlen("some-model") + 2 * 16;
  for (size_t field = 0; field < 5; ++field) {
    for (const uint64_t value :
         {uint64_t{0}, uint64_t{21}, uint64_t{1} << 27, uint64_t{1} << 28,
          uint64_t{1} << 40, ~uint64_t{0}}) {
      std::vector<uint8_t> bad = good;
      if (std::memcmp(&bad[counts + 8 * field], &value, 8) == 0) continue;
      std::memcpy(&bad[counts + 8 * field], &value, 8);
      const Hash128 hash = HashBytes(std::span(bad).first(header));
      std::memcpy(&bad[header], &hash.low, 8);
      std::memcpy(&bad[header + 8], &hash.high, 8);
      // A larger capacity alone is sound; nothing else is.
      const bool sound =
          field == 0 && (value == 21 || value == 1u << 27 || value == 1u << 28);
      if (sound) {
        EXPECT_NO_THROW(KVCache::FromBytes(bad));
      } else {
        EXPECT_THROW(KVCache::FromBytes(bad), CorruptFile)
            << "field " << field << " value " << value;
      }
    }
  }
}

// An empty range has no blocks, wherever it is said to lie.
TEST(SnapshotTest, AnEmptyRangeThatIsNotAtZeroIsRefused) {
  const std::vector<uint8_t> good = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  const size_t begin = 8 + 4 + 4 + 8 + 16 + 3 * 8;
  const size_t header = begin + 2 * 8 + 2 * 4 + 10 + 2 * 16;
  for (const uint64_t at : {1, 5, 16, 19}) {
    std::vector<uint8_t> bad(good.begin(),
                             good.begin() + static_cast<ptrdiff_t>(header));
    std::memcpy(&bad[begin], &at, 8);
    std::memcpy(&bad[begin + 8], &at, 8);
    // Whatever the reader makes of the range, the size is never the reason.
    for (const size_t payload : {8192, 8192 + 4096}) {
      std::vector<uint8_t> bytes = bad;
      const auto seal = [&](size_t from) {
        const Hash128 hash = HashBytes(std::span(bytes).subspan(from));
        const size_t end = bytes.size();
        bytes.resize(end + 16);
        std::memcpy(&bytes[end], &hash.low, 8);
        std::memcpy(&bytes[end + 8], &hash.high, 8);
      };
      const uint64_t total = header + 16 + 20 * 4 + 16 + payload + 16;
      std::memcpy(&bytes[16], &total, 8);
      seal(0);
      bytes.resize(bytes.size() + 20 * 4);
      seal(header + 16);
      bytes.resize(bytes.size() + payload);
      seal(bytes.size() - payload);
      EXPECT_THROW(KVCache::FromBytes(bytes), CorruptFile) << at;
    }
  }
}

TEST(SnapshotTest, APoolThatIsTooSmallLeavesNothingBehind) {
  const std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 150)->ToBytes();
  const auto pool = BlockPool::Create(20000);
  EXPECT_THROW(KVCache::FromBytes(bytes, {.pool = pool}), OutOfBlocks);
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

}  // namespace
}  // namespace gkv
