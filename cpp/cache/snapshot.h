#ifndef GEMMAKV_CACHE_SNAPSHOT_H_
#define GEMMAKV_CACHE_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_cache.h"

// A conversation as bytes; docs/snapshot-format.md describes every field.

namespace gkv {

class SnapshotEncoder {
 public:
  // Requires: no step runs on `cache` (a private fork).
  static std::vector<uint8_t> Encode(const KVCache& cache, bool checkpoints);
};

class SnapshotDecoder {
 public:
  // Throws CorruptFile, Mismatch (a later version) or OutOfBlocks.
  static std::unique_ptr<KVCache> Decode(std::span<const uint8_t> bytes,
                                         const CacheOptions& options);
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_SNAPSHOT_H_
