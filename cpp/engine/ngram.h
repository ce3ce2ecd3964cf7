#ifndef GEMMAKV_ENGINE_NGRAM_H_
#define GEMMAKV_ENGINE_NGRAM_H_

#include <cstdint>
#include <span>

namespace gkv {

// A hash of an n-gram, for hash tables in memory.
inline uint64_t HashOfTokens(std::span<const int32_t> tokens) {
  uint64_t hash = 0;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_NGRAM_H_
