#include "base/blake2b.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace gkv {
namespace {

std::string Digest(size_t size, std::span<const uint8_t> bytes,
                   std::span<const uint8_t> key = {}) {
  Blake2b hash(size, key);
  hash.Update(bytes);
  std::vector<uint8_t> out(size);
  hash.Finish(out);
  std::string hex;
  for (const uint8_t byte : out) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::vector<uint8_t> Ramp(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  return bytes;
}

// RFC 7693, appendix A, and what Python's hashlib gives.
TEST(Blake2bTest, KnownDigests) {
  EXPECT_EQ(Digest(64, AsBytes(std::string_view("abc"))),
            "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
            "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923");
  EXPECT_EQ(Digest(32, {}),
            "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8");
  EXPECT_EQ(Digest(32, Ramp(1000), AsBytes(std::string_view("key"))),
            "f53fae4c6be633334edeef3c21374fad9565115ec116dbdd52afe394038eda42");
  EXPECT_EQ(Digest(32, std::vector<uint8_t>(128)),
            "378d0caaaa3855f1b38693c1d6ef004fd118691c95c959d4efa950d6d6fcf7c1");
  EXPECT_EQ(
      Digest(16, std::vector<uint8_t>(256), std::vector<uint8_t>(64)),
      "75ec92ead8792df9c8a1850fadfc31bf");
}

TEST(Blake2bTest, HowTheBytesAreCutDoesNotMatter) {
  const std::vector<uint8_t> bytes = Ramp(700);
  const std::string whole = Digest(32, bytes);
  for (const size_t piece : {1, 7, 64, 127, 128, 129, 256}) {
    Blake2b hash(32);
    for (size_t at = 0; at < bytes.size(); at += piece) {
      hash.Update(std::span(bytes).subspan(
          at, std::min(piece, bytes.size() - at)));
    }
    std::vector<uint8_t> out(32);
    hash.Finish(out);
    Blake2b again(32);
    again.Update(bytes);
    std::vector<uint8_t> expected(32);
    again.Finish(expected);
    EXPECT_EQ(out, expected) << piece;
  }
}

}  // namespace
}  // namespace gkv
