#include "cache/snapshot.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "cache/conversation.h"
#include "cache/filled_cache.h"
#include "cache/snapshot_format.h"

namespace gkv {
namespace {

TEST(SnapshotTest, RestoresIntoAnyBlockSize) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    for (const size_t length : {1, 2, 16, 17, 33, 150}) {
      const auto cache = Filled(dtype, 16, length);
      const std::vector<uint8_t> bytes = cache->ToBytes();
      for (const size_t block_tokens : {16, 32, 128}) {
        const auto restored =
            Conversation::FromBytes(bytes, {.block_tokens = block_tokens});
        // Ranges begin at block boundaries of the cache that was saved.
        ExpectSame(*cache, *restored);
        EXPECT_EQ(restored->ToBytes(), bytes);
      }
    }
  }
}

TEST(SnapshotTest, CopiesDoNotDependOnTheCallersRounding) {
  const auto cache = Filled(KvDtype::kInt8, 16, 150);
  for (const bool values : {false, true}) {
    const std::vector<float> expected = cache->CopyLayer(1, values);
    const OddFpEnvironment odd;
    EXPECT_EQ(cache->CopyLayer(1, values), expected);
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
      ExpectSame(*expected, *Conversation::FromBytes(
                                Golden(name), {.block_tokens = block_tokens}));
    }
  }
  // Rewound past the window: what sliding layers hold is of no use.
  const auto lost = Filled(KvDtype::kBF16, 16, 50);
  lost->Truncate(25);
  const auto restored = Conversation::FromBytes(Golden("snapshot_v1_lost.kv"));
  EXPECT_EQ(restored->tokens(), lost->tokens());
  EXPECT_EQ(restored->CopyLayer(1, false), lost->CopyLayer(1, false));
  lost->Append(lost->Lock(), {{1}});
  restored->Append(restored->Lock(), {{1}});
  EXPECT_EQ(restored->next_position(), lost->next_position());
}

void ExpectSameWithCheckpoints(const Conversation& a, const Conversation& b) {
  ExpectSame(a, b);
  EXPECT_EQ(a.checkpoint_bytes(), b.checkpoint_bytes());
  ASSERT_EQ(a.CheckpointLengths(), b.CheckpointLengths());
  for (const size_t length : a.CheckpointLengths()) {
    const auto left = a.Fork(), right = b.Fork();
    EXPECT_EQ(left->Truncate(length).replay_tokens, 0u);
    EXPECT_EQ(right->Truncate(length).replay_tokens, 0u);
    ExpectSame(*left, *right);
  }
}

TEST(SnapshotTest, Version2FilesOpen) {
  const std::pair<const char*, KvDtype> files[] = {
      {"snapshot_v2_f32.kv", KvDtype::kF32},
      {"snapshot_v2_bf16.kv", KvDtype::kBF16},
      {"snapshot_v2_int8.kv", KvDtype::kInt8}};
  for (const auto& [name, dtype] : files) {
    const auto expected = FilledHybrid(dtype, 16);
    for (const size_t block_tokens : {16, 64}) {
      ASSERT_NO_FATAL_FAILURE(ExpectSameWithCheckpoints(
          *expected, *Conversation::FromBytes(Golden(name),
                                              {.block_tokens = block_tokens})));
    }
  }
}

// Caches of one window go on being written as version 2, byte for byte.
TEST(SnapshotTest, Version2IsWrittenWhereItCanSayEverything) {
  EXPECT_EQ(FilledHybrid(KvDtype::kBF16, 16)->ToBytes(true),
            Golden("snapshot_v2_bf16.kv"));
}

TEST(SnapshotTest, WindowsAndSharedLayersAreVersion3) {
  EXPECT_EQ(FilledWindows(KvDtype::kBF16, 16)->ToBytes(true),
            Golden("snapshot_v3.kv"));
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    const auto cache = FilledWindows(dtype, 16);
    for (const bool checkpoints : {false, true}) {
      const std::vector<uint8_t> bytes = cache->ToBytes(checkpoints);
      EXPECT_EQ(bytes[8], 3);
      for (const size_t block_tokens : {16, 64}) {
        const auto restored =
            Conversation::FromBytes(bytes, {.block_tokens = block_tokens});
        if (checkpoints) {
          ASSERT_NO_FATAL_FAILURE(ExpectSameWithCheckpoints(*cache, *restored));
        }
        ExpectSame(*cache, *restored);
        EXPECT_EQ(restored->ToBytes(checkpoints), bytes);
      }
    }
  }
}

TEST(SnapshotTest, Checklist19_EveryFlippedBitOfVersion3IsNoticed) {
  std::vector<uint8_t> bad = Golden("snapshot_v3.kv");
  for (size_t i = 0; i < bad.size(); ++i) {
    const uint8_t bit = static_cast<uint8_t>(1u << (i % 8));
    bad[i] ^= bit;
    EXPECT_THROW(Conversation::FromBytes(bad), Error) << "byte " << i;
    bad[i] ^= bit;
  }
}

// What checkpoints have in common is stored once, and restored once.
TEST(SnapshotTest, CheckpointsShareWhatTheyHold) {
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  for (const size_t block_tokens : {16, 32, 128}) {
    const auto pool = BlockPool::Create();
    const std::vector<uint8_t> bytes = cache->ToBytes(true);
    const auto restored = Conversation::FromBytes(
        bytes, {.block_tokens = block_tokens, .pool = pool});
    ASSERT_NO_FATAL_FAILURE(ExpectSameWithCheckpoints(*cache, *restored));
    EXPECT_EQ(restored->ToBytes(true), bytes);
    EXPECT_EQ(restored->nbytes(), pool->bytes_in_use());
    // No more blocks than positions 0..59 have, and a state for each of the
    // four moments and the step before it.
    const KvLayout& layout = restored->layout();
    const size_t blocks = (60 + block_tokens - 1) / block_tokens;
    EXPECT_LE(pool->bytes_in_use(),
              blocks * (layout.groups()[1].block_bytes +
                        layout.groups()[2].block_bytes) +
                  8 * layout.state_bytes());
  }
  EXPECT_TRUE(Conversation::FromBytes(cache->ToBytes(false))
                  ->CheckpointLengths()
                  .empty());
}

TEST(SnapshotTest, ASmallerBudgetKeepsTheLastCheckpoints) {
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  const std::vector<uint8_t> bytes = cache->ToBytes(true);
  const auto none = Conversation::FromBytes(bytes, {.checkpoint_bytes = 0});
  EXPECT_TRUE(none->CheckpointLengths().empty());
  ExpectSame(*none, *Conversation::FromBytes(bytes));
  const auto few = Conversation::FromBytes(
      bytes, {.block_tokens = 16,
              .checkpoint_bytes = cache->layout().checkpoint_bytes() +
                                  cache->layout().state_bytes()});
  EXPECT_EQ(few->CheckpointLengths().back(), 37u);
}

// What is written is the same for ever, for layers of at most one window.
TEST(SnapshotTest, Version2FilesAreWrittenAsTheyWere) {
  EXPECT_EQ(FilledHybrid(KvDtype::kF32, 16)->ToBytes(true),
            Golden("snapshot_v2_f32.kv"));
  EXPECT_EQ(FilledHybrid(KvDtype::kBF16, 16)->ToBytes(true),
            Golden("snapshot_v2_bf16.kv"));
  EXPECT_EQ(FilledHybrid(KvDtype::kInt8, 16)->ToBytes(true),
            Golden("snapshot_v2_int8.kv"));
}

// Strips that are longer than a piece.
TEST(SnapshotTest, PiecesMakeUpTheWhole) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8}) {
    const auto layout = std::make_shared<KvLayout>(
        std::vector<KvLayerSpec>{{LayerKind::kSliding, 1, 32, 20},
                                 {LayerKind::kFull, 2, 512, 0}},
        dtype, 64);
    Conversation cache(layout, {.capacity_tokens = 2000}, "");
    cache.Append(cache.Lock(), std::vector<int32_t>(1100, 3));
    Fill(cache, 1099);
    const std::vector<uint8_t> whole = cache.ToBytes();
    EXPECT_EQ(SnapshotWriter(cache, false).size_bytes(), whole.size());
    std::vector<uint8_t> bytes;
    size_t pieces = 0;
    cache.Save([&](std::span<const uint8_t> piece) {
      EXPECT_LE(piece.size(), size_t{256} << 10);
      bytes.insert(bytes.end(), piece.begin(), piece.end());
      ++pieces;
    });
    EXPECT_EQ(bytes, whole);
    EXPECT_GT(pieces, whole.size() >> 18);
    EXPECT_LT(pieces, (whole.size() >> 17) + 4);
    const auto restored = Conversation::FromBytes(whole, {.block_tokens = 16});
    ExpectSame(cache, *restored);
    EXPECT_EQ(restored->ToBytes(), whole);
  }
}

TEST(SnapshotTest, ASinkThatThrowsEndsTheWriting) {
  const auto cache = FilledHybrid(KvDtype::kBF16, 16);
  const std::vector<uint8_t> whole = cache->ToBytes(true);
  int calls = 0;
  const auto fail = [&](std::span<const uint8_t>) {
    if (++calls == 2) throw IoError("no space left", 28, "x");
  };
  EXPECT_THROW(cache->Save(fail, true), IoError);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(cache->ToBytes(true), whole);
}

TEST(SnapshotTest, EmptyAndLostStatesRestore) {
  const Conversation empty(FilledLayout(KvDtype::kBF16, 16),
                           {.capacity_tokens = 3}, "");
  const auto restored = Conversation::FromBytes(empty.ToBytes());
  EXPECT_EQ(restored->length(), 0u);
  EXPECT_EQ(restored->capacity_tokens(), 3u);
  const auto cache = Filled(KvDtype::kBF16, 16, 150);
  cache->Truncate(60);  // past the window: sliding layers hold nothing
  ExpectSame(*cache, *Conversation::FromBytes(cache->ToBytes()));
}

// Of the shape of Gemma 3 270M: beside token ids and header within 5 % of the
// keys and values that are held.
TEST(SnapshotTest, SizeIsThatOfTheKeysAndValues) {
  std::vector<KvLayerSpec> layers(18, {LayerKind::kSliding, 1, 256, 512});
  for (size_t i = 5; i < 18; i += 6) {
    layers[i] = {LayerKind::kFull, 1, 256, 0};
  }
  const auto layout = std::make_shared<KvLayout>(layers, KvDtype::kBF16, 64);
  Conversation cache(layout, {.capacity_tokens = 4096}, "gemma3-270m");
  for (const size_t length : {300, 777, 2048, 2500}) {
    cache.Append(cache.Lock(), std::vector<int32_t>(length - cache.length(), 7));
    for (size_t at = cache.next_position(); at < length; at += 128) {
      KvStepView step = cache.Prepare(cache.Lock(), at, std::min(length, at + 128));
      cache.Commit(cache.Lock(), step);
    }
    size_t held = 0;
    for (size_t layer = 0; layer < 18; ++layer) {
      const auto [begin, end] = cache.HeldRange(layer);
      held += (end - begin) * 2 * 256 * 2;
    }
    const size_t size = cache.ToBytes().size() - 4 * length;
    EXPECT_GE(size, held);
    EXPECT_LT(static_cast<double>(size), 1.05 * static_cast<double>(held));
  }
}

TEST(SnapshotTest, Checklist19_EveryFlippedBitIsNoticed) {
  const std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  std::vector<uint8_t> bad = bytes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const uint8_t bit = static_cast<uint8_t>(1u << (i % 8));
    bad[i] ^= bit;
    EXPECT_THROW(Conversation::FromBytes(bad), Error) << "byte " << i;
    bad[i] ^= bit;
  }
  EXPECT_NO_THROW(Conversation::FromBytes(bad));
}

TEST(SnapshotTest, Checklist19_EveryTruncationAndExtensionIsNoticed) {
  std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  for (size_t size = 0; size < bytes.size(); size += size < 300 ? 1 : 97) {
    EXPECT_THROW(Conversation::FromBytes(std::span(bytes).first(size)),
                 CorruptFile)
        << size;
  }
  bytes.push_back(0);
  EXPECT_THROW(Conversation::FromBytes(bytes), CorruptFile);
}

TEST(SnapshotTest, Checklist19_ALaterVersionIsAMismatch) {
  std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 20)->ToBytes();
  bytes[8] = kSnapshotVersion + 1;
  EXPECT_THROW(Conversation::FromBytes(bytes), Mismatch);
  bytes[8] = 0;
  EXPECT_THROW(Conversation::FromBytes(bytes), CorruptFile);
}

// Overwrites a number of the header and makes its checksum right again, as an
// attacker would.
std::vector<uint8_t> Forged(std::vector<uint8_t> bytes, size_t header_bytes,
                            size_t at, uint64_t value, size_t size) {
  std::memcpy(&bytes[at], &value, size);
  const Hash128 hash = HashBytes(std::span(bytes).first(header_bytes));
  std::memcpy(&bytes[header_bytes], &hash.low, 8);
  std::memcpy(&bytes[header_bytes + 8], &hash.high, 8);
  return bytes;
}

TEST(SnapshotTest, Checklist19_AbsurdNumbersWithARightChecksumAreRefused) {
  const auto cache = Filled(KvDtype::kBF16, 16, 60);
  ASSERT_TRUE(cache->MakeCheckpoint());
  const std::vector<uint8_t> good = cache->ToBytes(true);
  ByteReader reader(good);
  const SnapshotHeader header = DecodeSnapshotHeader(good, reader);
  ASSERT_EQ(header.marks.size(), 2u);
  const size_t header_bytes = reader.offset() - sizeof(Hash128);
  // magic, version, dtype, total size, fingerprint; then four counts (the last
  // is the checkpoint budget), five sizes, the name, layers, marks, a range.
  const size_t counts = 8 + 4 + 4 + 8 + 16;
  const size_t sizes = counts + 4 * 8;
  const size_t layers = sizes + 5 * 4 + std::strlen("some-model");
  const size_t marks = layers + 2 * 16;
  const uint64_t values[] = {
      0, 1, 21, 33, 61, uint64_t{1} << 27, uint64_t{1} << 40, ~uint64_t{0}};
  size_t refused = 0;
  const auto expect_sound_or_refused = [&](size_t at, size_t size) {
    for (const uint64_t value : values) {
      const auto bad = Forged(good, header_bytes, at, value, size);
      if (bad == good) continue;
      try {
        // Numbers that fit together by chance are sound: of what is there.
        const auto restored = Conversation::FromBytes(bad);
        EXPECT_EQ(restored->tokens(), cache->tokens()) << "offset " << at;
      } catch (const CorruptFile&) {
        ++refused;
      }
    }
  };
  for (size_t at = counts; at < sizes; at += 8) expect_sound_or_refused(at, 8);
  for (size_t at = sizes; at < sizes + 20; at += 4) {
    expect_sound_or_refused(at, 4);
  }
  for (size_t at = layers; at < marks; at += 4) expect_sound_or_refused(at, 4);
  for (size_t at = marks; at < header_bytes; at += 8) {
    expect_sound_or_refused(at, 8);
  }
  EXPECT_GT(refused, 150u);
}

TEST(SnapshotTest, Checklist19_NumbersThatDoNotFitTogetherAreRefused) {
  const auto cache = Filled(KvDtype::kBF16, 16, 60);
  ASSERT_TRUE(cache->MakeCheckpoint());
  const std::vector<uint8_t> good = cache->ToBytes(true);
  ByteReader reader(good);
  DecodeSnapshotHeader(good, reader);
  const size_t header_bytes = reader.offset() - sizeof(Hash128);
  const size_t counts = 8 + 4 + 4 + 8 + 16;
  const size_t marks = counts + 4 * 8 + 5 * 4 + std::strlen("some-model") + 32;
  const struct {
    const char* what;
    size_t at;
    uint64_t value;
  } cases[] = {
      {"no capacity", counts, 0},
      {"more tokens than the capacity", counts, 59},
      {"more computed than tokens", counts + 16, 61},
      {"a mark behind what is computed", marks, 60},
      {"a mark before its window", marks + 16, 60},
      {"a window that is not there", marks + 16, 0},
      {"a state where no layer recurs", marks + 24, 5},
      {"a checkpoint at nothing", marks + 32, 0},
      {"a checkpoint without its window", marks + 32 + 16, 58},
      {"a range behind what is computed", marks + 64 + 8, 60},
      {"an empty range", marks + 64, 59},
  };
  for (const auto& c : cases) {
    EXPECT_THROW(
        Conversation::FromBytes(Forged(good, header_bytes, c.at, c.value, 8)),
        CorruptFile)
        << c.what;
  }
}

TEST(SnapshotTest, Checklist19_AbsurdNumbersOfVersion3AreRefused) {
  const std::vector<uint8_t> good = Golden("snapshot_v3.kv");
  ByteReader reader(good);
  const SnapshotHeader header = DecodeSnapshotHeader(good, reader);
  ASSERT_EQ(header.sliding.size(), 2u);
  const size_t header_bytes = reader.offset() - sizeof(Hash128);
  const size_t layers =
      8 + 4 + 4 + 8 + 16 + 4 * 8 + 5 * 4 + std::strlen("some-windows");
  size_t refused = 0;
  for (size_t at = layers; at < header_bytes; at += 4) {
    for (const uint32_t value : {0u, 1u, 2u, 12u, 25u, 40u, ~0u}) {
      const auto bad = Forged(good, header_bytes, at, value, 4);
      if (bad == good) continue;
      try {
        const auto restored = Conversation::FromBytes(bad);
        EXPECT_EQ(restored->length(), 60u) << "offset " << at;
      } catch (const CorruptFile&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 300u);
  // Version 2 has one window, whatever its layers say.
  EXPECT_THROW(Conversation::FromBytes(Forged(good, header_bytes, 8, 2, 4)),
               CorruptFile);
}

// An empty range has no blocks, wherever it is said to lie.
TEST(SnapshotTest, AnEmptyRangeThatIsNotAtZeroIsRefused) {
  const std::vector<uint8_t> good = Golden("snapshot_v1_bf16.kv");
  constexpr size_t kTokenBytes = 50 * 4;
  const size_t begin = 8 + 4 + 4 + 8 + 16 + 3 * 8;
  const size_t header = begin + 2 * 8 + 2 * 4 + 10 + 2 * 16;
  for (const uint64_t at : {1, 5, 16, 19}) {
    std::vector<uint8_t> bad(good.begin(),
                             good.begin() + static_cast<ptrdiff_t>(header));
    std::memcpy(&bad[begin], &at, 8);
    std::memcpy(&bad[begin + 8], &at, 8);
    // Whatever the reader makes of the range, the size is never the reason.
    for (const size_t payload : {16384, 16384 + 4096}) {
      std::vector<uint8_t> bytes = bad;
      const auto seal = [&](size_t from) {
        const Hash128 hash = HashBytes(std::span(bytes).subspan(from));
        const size_t end = bytes.size();
        bytes.resize(end + 16);
        std::memcpy(&bytes[end], &hash.low, 8);
        std::memcpy(&bytes[end + 8], &hash.high, 8);
      };
      const uint64_t total = header + 16 + kTokenBytes + 16 + payload + 16;
      std::memcpy(&bytes[16], &total, 8);
      seal(0);
      bytes.resize(bytes.size() + kTokenBytes);
      seal(header + 16);
      bytes.resize(bytes.size() + payload);
      seal(bytes.size() - payload);
      EXPECT_THROW(Conversation::FromBytes(bytes), CorruptFile) << at;
    }
  }
}

TEST(SnapshotTest, Checklist19_APoolThatIsTooSmallLeavesNothingBehind) {
  const std::vector<uint8_t> bytes = Filled(KvDtype::kBF16, 16, 150)->ToBytes();
  const auto pool = BlockPool::Create(20000);
  EXPECT_THROW(Conversation::FromBytes(bytes, {.pool = pool}), CacheFull);
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

}  // namespace
}  // namespace gkv
