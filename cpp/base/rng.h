#ifndef GEMMAKV_BASE_RNG_H_
#define GEMMAKV_BASE_RNG_H_

#include <cstdint>

namespace gkv {

// Uniform double in [0, 1) that is a pure function of (seed, counter): the
// draw for a token depends on the request's seed and the token's position
// alone, so a forked, restored or batched conversation repeats it exactly.
// 53 random bits.
double UniformAt(uint64_t seed, uint64_t counter);

// A seed from the operating system's entropy source.
uint64_t RandomSeed();

}  // namespace gkv

#endif  // GEMMAKV_BASE_RNG_H_
