#include "base/blake2b.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstring>

namespace gkv {
namespace {

constexpr uint64_t kInitial[8] = {
    0x6A09E667F3BCC908u, 0xBB67AE8584CAA73Bu, 0x3C6EF372FE94F82Bu,
    0xA54FF53A5F1D36F1u, 0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu,
    0x1F83D9ABFB41BD6Bu, 0x5BE0CD19137E2179u};

constexpr uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

void Mix(uint64_t* v, size_t a, size_t b, size_t c, size_t d, uint64_t x,
         uint64_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 63);
}

}  // namespace

Blake2b::Blake2b(size_t size_bytes, std::span<const uint8_t> key) {
  assert(size_bytes >= 1 && size_bytes <= 64 && key.size() <= 64);
  std::copy(std::begin(kInitial), std::end(kInitial), state_.begin());
  state_[0] ^= 0x01010000u ^ key.size() << 8 ^ size_bytes;
  if (key.empty()) return;
  std::copy(key.begin(), key.end(), block_.begin());
  filled_ = kBlockBytes;
}

// A full block waits for the next byte, since the last block is compressed
// differently.
void Blake2b::Update(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    if (filled_ == kBlockBytes) Compress(false);
    const size_t take = std::min(bytes.size(), kBlockBytes - filled_);
    std::memcpy(block_.data() + filled_, bytes.data(), take);
    filled_ += take;
    bytes = bytes.subspan(take);
  }
}

void Blake2b::Finish(std::span<uint8_t> out) {
  std::fill(block_.begin() + static_cast<ptrdiff_t>(filled_), block_.end(),
            uint8_t{0});
  Compress(true);
  std::memcpy(out.data(), state_.data(), out.size());
}

void Blake2b::Compress(bool last) {
  total_ += filled_;
  filled_ = 0;
  uint64_t v[16], m[16];
  std::copy(state_.begin(), state_.end(), v);
  std::copy(std::begin(kInitial), std::end(kInitial), v + 8);
  std::memcpy(m, block_.data(), sizeof(m));
  v[12] ^= total_;
  if (last) v[14] = ~v[14];
  for (size_t round = 0; round < 12; ++round) {
    const uint8_t* s = kSigma[round % 10];
    for (size_t i = 0; i < 4; ++i) {
      Mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
    }
    for (size_t i = 0; i < 4; ++i) {
      Mix(v, i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12,
          m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
  }
  for (size_t i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
}

}  // namespace gkv
