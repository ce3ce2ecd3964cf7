#include "io/byte_io.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

TEST(ByteIoTest, LittleEndian) {
  ByteWriter writer;
  writer.Write(uint32_t{0x04030201});
  writer.Write(uint16_t{0x0605});
  writer.Write(1.0f);
  writer.Write(Hash128{7, 8});
  const std::vector<uint8_t> expected = {1, 2, 3, 4, 5, 6, 0, 0, 0x80, 0x3F,
                                         7, 0, 0, 0, 0, 0, 0, 0,
                                         8, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(writer.bytes(), expected);
  EXPECT_EQ(writer.size(), expected.size());
}

TEST(ByteIoTest, ReadsBackWhatWasWritten) {
  const std::vector<uint8_t> raw = {9, 8, 7};
  ByteWriter writer;
  writer.Write(int8_t{-5});
  writer.Write(uint64_t{1} << 63);
  writer.WriteBytes(raw);
  writer.Write(-0.25);
  writer.Write(Hash128{1, 2});
  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.Read<int8_t>("a"), -5);
  EXPECT_EQ(reader.Read<uint64_t>("b"), uint64_t{1} << 63);
  EXPECT_EQ(reader.offset(), 9u);
  EXPECT_EQ(reader.remaining(), 27u);
  const auto bytes = reader.ReadBytes(3, "c");
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.end()), raw);
  EXPECT_EQ(reader.Read<double>("d"), -0.25);
  EXPECT_EQ(reader.Read<Hash128>("e"), (Hash128{1, 2}));
  EXPECT_EQ(reader.remaining(), 0u);
}

TEST(ByteIoTest, StartsAtAnOffset) {
  const std::vector<uint8_t> bytes = {1, 2, 3, 4};
  ByteReader reader(bytes, 2);
  EXPECT_EQ(reader.offset(), 2u);
  EXPECT_EQ(reader.Read<uint8_t>("x"), 3);
  EXPECT_EQ(ByteReader(bytes, 4).remaining(), 0u);
}

TEST(ByteIoTest, PastTheEndIsCorruptAndMovesNothing) {
  const std::vector<uint8_t> bytes = {1, 2, 3, 4, 5};
  ByteReader reader(bytes);
  (void)reader.Read<uint16_t>("start");
  try {
    (void)reader.Read<uint32_t>("length");
    FAIL();
  } catch (const CorruptFile& error) {
    EXPECT_STREQ(error.what(),
                 "offset 2: expected 4 bytes of length, found 3 before the "
                 "end");
  }
  EXPECT_EQ(reader.offset(), 2u);
  EXPECT_THROW(reader.ReadBytes(std::numeric_limits<uint64_t>::max(), "x"),
               CorruptFile);
  EXPECT_EQ(reader.ReadBytes(3, "rest").size(), 3u);
  EXPECT_EQ(reader.ReadBytes(0, "nothing").size(), 0u);
  EXPECT_THROW((void)reader.Read<uint8_t>("x"), CorruptFile);
}

}  // namespace
}  // namespace gkv
