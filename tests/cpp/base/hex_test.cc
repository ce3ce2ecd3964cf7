#include "base/hex.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace gkv {
namespace {

TEST(HexTest, BytesInTheirOrder) {
  const std::array<uint8_t, 4> bytes = {0x00, 0x0F, 0xA1, 0xFF};
  EXPECT_EQ(ToHex(bytes), "000fa1ff");
  std::array<uint8_t, 4> parsed{};
  EXPECT_TRUE(ParseHex("000fa1ff", parsed));
  EXPECT_EQ(parsed, bytes);
  EXPECT_EQ(ToHex(std::span<const uint8_t>()), "");
  EXPECT_TRUE(ParseHex("", std::span<uint8_t>()));
}

TEST(HexTest, NumbersHighestDigitFirst) {
  constexpr uint64_t kNumber = 0x0123456789ABCDEF;
  EXPECT_EQ(ToHex(kNumber), "0123456789abcdef");
  uint64_t parsed = 1;
  EXPECT_TRUE(ParseHex("0123456789abcdef", parsed));
  EXPECT_EQ(parsed, kNumber);
}

TEST(HexTest, TakesNothingElse) {
  std::array<uint8_t, 2> bytes{};
  for (const std::string text :
       {"", "abc", "abcde", "ABCD", "abcg", " bcd", "+bcd", "0xab", "ab\0d"}) {
    EXPECT_FALSE(ParseHex(text, bytes)) << text;
  }
  uint64_t number = 0;
  EXPECT_FALSE(ParseHex("0123456789abcde", number));
  EXPECT_FALSE(ParseHex("0123456789abcdeF", number));
}

}  // namespace
}  // namespace gkv
