#include "store/address.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace gkv {
namespace {

std::string Hex(const Address& address) {
  std::string hex;
  for (const uint8_t byte : address.bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::vector<int32_t> Tokens(int32_t begin, size_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), begin);
  return tokens;
}

// Stores in the field hold these names: they never change. Made with Python's
// hashlib from docs/internals/block-store-format.md.
TEST(AddressTest, GoldenAddresses) {
  const Address salt = SaltDigest(AsBytes(std::string("tenant")));
  EXPECT_EQ(Hex(salt),
            "a3cc0be1587dcf495c1e91231292a3fc7f134d4f77b35d70644864d8640118a4");
  const Address root = RootAddress({1, 2}, {3, 4}, salt);
  EXPECT_EQ(Hex(root),
            "5b5c3706da703d94c8d67be2d8614fbb69b92f6428cbd36c36e3657e9c1e9ae4");
  const Address page = PageAddress(root, Tokens(0, 256));
  EXPECT_EQ(Hex(page),
            "ba37b43e663f4d4ec65909ba21af28036a4e9ce8010a8829feb44193a67d5e20");
  EXPECT_EQ(Hex(WindowAddress(page, 512)),
            "bffd25ea13855c98a5fc0e70a4f8fe032cca887b69453d783a1607213f3cf546");
  const Address resume = ResumeAddress(page, 259, Tokens(256, 3));
  EXPECT_EQ(Hex(resume),
            "e2e0934513567f8eebd87ec6b23051738f167841d8b3f33f11d429e57a374679");
  std::array<uint8_t, 32> key;
  std::iota(key.begin(), key.end(), uint8_t{0});
  EXPECT_EQ(NameOf(resume, key).Hex(), "3c988015134d6748e3600ed25cb243b4");
  EXPECT_EQ(SaltDigest({}), Address{});
}

TEST(AddressTest, EveryPartCounts) {
  const Address salt = SaltDigest(AsBytes(std::string("a")));
  const std::vector<int32_t> tokens = Tokens(0, 256);
  std::vector<int32_t> other = tokens;
  other[255] ^= 1;
  const Address root = RootAddress({1, 2}, {3, 4}, salt);
  std::set<Address> seen{
      root,
      RootAddress({1, 3}, {3, 4}, salt),
      RootAddress({2, 2}, {3, 4}, salt),
      RootAddress({1, 2}, {3, 5}, salt),
      RootAddress({1, 2}, {3, 4}, {}),
      PageAddress(root, tokens),
      PageAddress(root, other),
      PageAddress(PageAddress(root, tokens), tokens),
      WindowAddress(root, 8),
      WindowAddress(root, 9),
      ResumeAddress(root, 1, Tokens(0, 1)),
      ResumeAddress(root, 1, Tokens(1, 1)),
      ResumeAddress(root, 257, Tokens(0, 1)),
      ResumeAddress(root, 2, Tokens(0, 2)),
  };
  EXPECT_EQ(seen.size(), 14u);
}

TEST(AddressTest, CandidatesAreBoundariesOfPagesTurnsAndCallers) {
  std::vector<int32_t> tokens(600, 7);
  tokens[300] = 106;
  tokens[590] = 1;
  const std::vector<int32_t> ends{1, 106};
  const std::vector<size_t> boundaries{20, 300, 900};
  EXPECT_EQ(ResumeCandidates(tokens, ends, boundaries, 600),
            (std::vector<size_t>{590, 589, 512, 300, 299, 256, 20}));
  EXPECT_EQ(ResumeCandidates(tokens, ends, boundaries, 589),
            (std::vector<size_t>{589, 512, 300, 299, 256, 20}));
  EXPECT_EQ(ResumeCandidates(tokens, ends, boundaries, 5000, 3),
            (std::vector<size_t>{590, 589, 512}));
  EXPECT_EQ(ResumeCandidates(tokens, {}, {}, 256), std::vector<size_t>{256});
  EXPECT_TRUE(ResumeCandidates(tokens, {}, {}, 255).empty());
  EXPECT_TRUE(ResumeCandidates({}, ends, boundaries, 9).empty());
}

}  // namespace
}  // namespace gkv
