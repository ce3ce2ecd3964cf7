#include "base/rng.h"

#include <random>

namespace gkv {
namespace {

// Philox-4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011): a keyed permutation of counters.
struct Philox {
  uint32_t counter[4];
  uint32_t key[2];

  void Round() {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0],
        static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1],
        static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
};

}  // namespace

double UniformAt(uint64_t seed, uint64_t counter) {
  Philox philox{
      {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0,
       0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
  for (int round = 0; round < 10; ++round) philox.Round();
  const uint64_t bits = uint64_t{philox.counter[0]} << 32 | philox.counter[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

uint64_t RandomSeed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace gkv
