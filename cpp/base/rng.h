#ifndef GEMMAKV_BASE_RNG_H_
#define GEMMAKV_BASE_RNG_H_

#include <cstdint>

namespace gkv {

// Returns a uniform double in [0, 1), of 53 random bits, that is a pure
// function of (seed, counter). The draw for a token depends on the request's
// seed and the token's position alone, so a forked, restored or batched
// conversation repeats it exactly.
double UniformAt(uint64_t seed, uint64_t counter);

// Returns a seed from the operating system's entropy source.
uint64_t RandomSeed();

}  // namespace gkv

#endif  // GEMMAKV_BASE_RNG_H_
