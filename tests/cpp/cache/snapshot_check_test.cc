#include "cache/snapshot_check.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "cache/filled_cache.h"

namespace gkv {
namespace {

std::vector<uint8_t> Good() {
  return Filled(KvDtype::kBF16, 16, 40)->ToBytes();
}

// Names of the sections that are bad, in order.
std::string Bad(const std::vector<uint8_t>& bytes) {
  std::string names;
  for (const SnapshotSection& section : CheckSnapshot(bytes).sections) {
    if (!section.problem.empty()) names += section.name + ";";
  }
  return names;
}

TEST(SnapshotCheckTest, ASoundOneIsSound) {
  const std::vector<uint8_t> bytes = Good();
  const SnapshotCheck check = CheckSnapshot(bytes);
  ASSERT_EQ(check.sections.size(), 4u);
  size_t end = 0;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(check.sections[i].problem, "");
    EXPECT_EQ(check.sections[i].offset, end);  // without gaps
    end += check.sections[i].size_bytes;
  }
  EXPECT_EQ(end, bytes.size());
  EXPECT_EQ(check.sections[3].name, "content");
  EXPECT_EQ(check.sections[3].problem, "");
  EXPECT_GE(check.version, 2u);
}

TEST(SnapshotCheckTest, EveryFlippedByteIsInItsSection) {
  const std::vector<uint8_t> good = Good();
  const SnapshotCheck check = CheckSnapshot(good);
  for (size_t i = 0; i < 3; ++i) {
    const SnapshotSection& section = check.sections[i];
    for (size_t at = 0; at < section.size_bytes; at += 1 + at / 50) {
      std::vector<uint8_t> bad = good;
      const size_t offset = section.offset + at;
      bad[offset] ^= 0x40;
      if (offset < 12) {  // magic and version
        EXPECT_THROW(CheckSnapshot(bad), Error) << offset;
      } else {
        EXPECT_EQ(Bad(bad), section.name + ";") << offset;
      }
    }
  }
}

TEST(SnapshotCheckTest, SeveralBadSectionsAreAllNamed) {
  std::vector<uint8_t> bytes = Good();
  const SnapshotCheck check = CheckSnapshot(bytes);
  bytes[check.sections[1].offset] ^= 1;
  bytes[check.sections[2].offset] ^= 1;
  EXPECT_EQ(Bad(bytes), "token ids;keys and values;");
}

TEST(SnapshotCheckTest, TruncationIsNoticed) {
  const std::vector<uint8_t> good = Good();
  for (size_t size = 0; size < good.size(); size += size < 300 ? 1 : 97) {
    const std::vector<uint8_t> bytes(good.begin(),
                                     good.begin() + static_cast<long>(size));
    if (size < 12) {
      EXPECT_THROW(CheckSnapshot(bytes), CorruptFile) << size;
    } else {
      EXPECT_EQ(Bad(bytes), "header;") << size;
    }
  }
}

// Checksums alone do not make a conversation.
TEST(SnapshotCheckTest, ContentThatDoesNotRestoreIsNoticed) {
  std::vector<uint8_t> bytes = Good();
  const SnapshotSection tokens = CheckSnapshot(bytes).sections[1];
  const int32_t negative = -5;
  std::memcpy(&bytes[tokens.offset], &negative, 4);
  const size_t size = tokens.size_bytes - sizeof(Hash128);
  const Hash128 hash = HashBytes(std::span(bytes).subspan(tokens.offset, size));
  std::memcpy(&bytes[tokens.offset + size], &hash.low, 8);
  std::memcpy(&bytes[tokens.offset + size + 8], &hash.high, 8);
  EXPECT_EQ(Bad(bytes), "content;");
}

}  // namespace
}  // namespace gkv
