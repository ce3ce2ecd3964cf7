#include "base/hash.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace gkv {
namespace {

// 0, 1, 2, ... modulo 251, so that no block repeats another.
std::vector<uint8_t> Ramp(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  return bytes;
}

std::vector<uint8_t> RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  return bytes;
}

size_t DifferentBits(const Hash128& a, const Hash128& b) {
  return static_cast<size_t>(std::popcount(a.low ^ b.low) +
                             std::popcount(a.high ^ b.high));
}

// Stored files hold these values: they never change.
TEST(HashTest, GoldenValues) {
  struct Golden {
    size_t size;
    uint64_t seed;
    const char* hex;
  };
  const Golden goldens[] = {
      {0, 0, "519ae444c15f6cfcf1208e844ff2ead9"},
      {1, 0, "37b989ff7a30cabfee8b7fabef040767"},
      {7, 0, "49e7c2a0acbb2594c22a2efed25c3c62"},
      {8, 0, "c8618b77bef539a187604fffe9fbff76"},
      {63, 0, "009195181d7db0795fd61392c438d1d5"},
      {64, 0, "2b15ec12a892992f91a9fcd9b6b703ec"},
      {65, 0, "759b0cf180fbecd3d519dfd5a7df9966"},
      {128, 0, "18ea11a25a00b9602d0b0d80e31b9d5f"},
      {1000, 0, "7211b1cc3068f48e2f85acf830d8de18"},
      {100000, 0, "67e44b7ab004206f47e382442e6dd93b"},
      {0, 1, "9530d63e0e7f114a3efdeb3eb33ee9e1"},
      {100, UINT64_MAX, "68c3bb4bc6eb1420c6eb901aaf0c4e43"},
  };
  for (const Golden& golden : goldens) {
    EXPECT_EQ(HashBytes(Ramp(golden.size), golden.seed).Hex(), golden.hex)
        << golden.size << " bytes, seed " << golden.seed;
  }
}

TEST(HashTest, HexIsHighThenLow) {
  const Hash128 hash{0x0123456789abcdefu, 0xfedcba9876543210u};
  EXPECT_EQ(hash.Hex(), "fedcba98765432100123456789abcdef");
  EXPECT_EQ(Hash128{}.Hex(), std::string(32, '0'));
}

TEST(HashTest, IndependentOfChunking) {
  const std::vector<uint8_t> bytes = RandomBytes(1000, 1);
  std::mt19937 rng(2);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t size = rng() % (bytes.size() + 1);
    const size_t longest = 1 + rng() % 200;
    Hasher hasher(7);
    for (size_t at = 0; at < size;) {
      // Empty updates too.
      const size_t take = std::min<size_t>(size - at, rng() % (longest + 1));
      hasher.Update(std::span(bytes).subspan(at, take));
      at += take;
    }
    ASSERT_EQ(hasher.Finish(), HashBytes(std::span(bytes).first(size), 7))
        << size << " bytes in chunks of up to " << longest;
  }
}

TEST(HashTest, UnalignedInputGivesTheSameValue) {
  const std::vector<uint8_t> bytes = RandomBytes(300, 3);
  const Hash128 expected = HashBytes(bytes);
  for (size_t shift = 1; shift < 9; ++shift) {
    std::vector<uint8_t> moved(shift);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    EXPECT_EQ(HashBytes(std::span(moved).subspan(shift)), expected);
  }
}

TEST(HashTest, FinishDoesNotDisturbTheStream) {
  const std::vector<uint8_t> bytes = Ramp(200);
  Hasher hasher;
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(hasher.Finish(), HashBytes(std::span(bytes).first(i)));
    hasher.Update(std::span(bytes).subspan(i, 1));
  }
  EXPECT_EQ(hasher.Finish(), HashBytes(bytes));
}

TEST(HashTest, UpdateValueHashesTheBytesOfTheValue) {
  Hasher hasher;
  hasher.UpdateValue(uint32_t{0x04030201});
  hasher.UpdateValue(1.0f);
  const uint8_t bytes[] = {1, 2, 3, 4, 0, 0, 0x80, 0x3f};
  EXPECT_EQ(hasher.Finish(), HashBytes(bytes));
}

TEST(HashTest, TheNumberOfTrailingZerosMatters) {
  const std::vector<uint8_t> zeros(300);
  std::set<Hash128> hashes;
  for (size_t size = 0; size <= zeros.size(); ++size) {
    hashes.insert(HashBytes(std::span(zeros).first(size)));
  }
  EXPECT_EQ(hashes.size(), zeros.size() + 1);
}

TEST(HashTest, SeedsGiveUnrelatedValues) {
  const std::vector<uint8_t> bytes = Ramp(100);
  std::set<Hash128> hashes;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    hashes.insert(HashBytes(bytes, seed));
    hashes.insert(HashBytes({}, seed));
  }
  EXPECT_EQ(hashes.size(), 2000u);
}

// Swapping two words or two blocks leaves every sum as it was.
TEST(HashTest, OrderMatters) {
  const std::vector<uint8_t> bytes = RandomBytes(1024, 4);
  std::set<Hash128> hashes{HashBytes(bytes)};
  size_t expected = 1;
  for (const size_t unit : {size_t{8}, size_t{64}}) {
    for (size_t a = 0; a + unit <= 512; a += unit) {
      for (size_t b = a + unit; b + unit <= 512; b += unit) {
        std::vector<uint8_t> swapped = bytes;
        std::swap_ranges(&swapped[a], &swapped[a] + unit, &swapped[b]);
        hashes.insert(HashBytes(swapped));
        ++expected;
      }
    }
  }
  EXPECT_EQ(hashes.size(), expected);
}

// One flipped input bit flips each output bit with probability 1/2, wherever
// it is: in the first block, the last full one or the tail.
TEST(HashTest, Avalanche) {
  constexpr size_t kBytes = 200;
  constexpr size_t kTrials = 4;
  std::vector<size_t> flips(128);
  for (uint32_t trial = 0; trial < kTrials; ++trial) {
    std::vector<uint8_t> bytes = RandomBytes(kBytes, 100 + trial);
    const Hash128 base = HashBytes(bytes);
    for (size_t bit = 0; bit < 8 * kBytes; ++bit) {
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      const Hash128 hash = HashBytes(bytes);
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      // 128 fair coins: 5.66 is the standard deviation.
      const double distance = static_cast<double>(DifferentBits(base, hash));
      EXPECT_NEAR(distance, 64, 6 * 5.66) << "input bit " << bit;
      for (size_t i = 0; i < 64; ++i) {
        flips[i] += (base.low ^ hash.low) >> i & 1;
        flips[64 + i] += (base.high ^ hash.high) >> i & 1;
      }
    }
  }
  constexpr double kFlips = 8.0 * kBytes * kTrials;
  for (size_t i = 0; i < flips.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(flips[i]), kFlips / 2,
                5 * std::sqrt(kFlips) / 2)
        << "output bit " << i;
  }
}

// Inputs as regular as weights and token ids are: low-entropy counters. Each
// 64-bit half alone must not collide, and its low bits must be uniform.
TEST(HashTest, CountersDoNotCollide) {
  constexpr size_t kCount = 100000;
  constexpr size_t kBuckets = 1024;
  std::vector<uint64_t> low, high;
  std::vector<size_t> buckets(kBuckets);
  uint32_t page[16] = {};
  for (uint32_t i = 0; i < kCount; ++i) {
    page[i % 16] = i;
    Hasher hasher;
    hasher.Update({reinterpret_cast<const uint8_t*>(page), sizeof(page)});
    const Hash128 hash = hasher.Finish();
    low.push_back(hash.low);
    high.push_back(hash.high);
    ++buckets[hash.low % kBuckets];
  }
  for (std::vector<uint64_t>* half : {&low, &high}) {
    std::sort(half->begin(), half->end());
    EXPECT_EQ(std::adjacent_find(half->begin(), half->end()), half->end());
  }
  double chi_square = 0;
  constexpr double kExpected = static_cast<double>(kCount) / kBuckets;
  for (const size_t count : buckets) {
    const double error = static_cast<double>(count) - kExpected;
    chi_square += error * error / kExpected;
  }
  // 1023 degrees of freedom: mean 1023, standard deviation 45.
  EXPECT_NEAR(chi_square, 1023, 5 * 45);
}

}  // namespace
}  // namespace gkv
