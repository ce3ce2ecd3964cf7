#ifndef GEMMAKV_CACHE_BLOCK_HEAP_H_
#define GEMMAKV_CACHE_BLOCK_HEAP_H_

#include <cstddef>
#include <unordered_map>

#include "cache/block.h"

namespace gkv {

// Blocks from the system's memory, of which a bounded number is kept for reuse
// when they are freed, by size, the last one first. Not thread-safe.
class BlockHeap {
 public:
  BlockHeap() = default;
  ~BlockHeap() { Clear(); }
  BlockHeap(const BlockHeap&) = delete;
  BlockHeap& operator=(const BlockHeap&) = delete;

  // A block with one reference and no owner, at most `room` bytes of others
  // being kept then. Null if the system has no memory.
  Block* Allocate(size_t size_bytes, size_t room) noexcept;
  // False if it is better off with the system: the caller deletes it, when it
  // holds no lock. Requires: from Allocate.
  bool Keep(Block* block) noexcept;
  static void Delete(Block* block) noexcept;

 private:
  void Clear() noexcept;

  size_t kept_bytes_ = 0;
  // A size enters when it is first allocated, so that Keep allocates nothing.
  std::unordered_map<size_t, Block*> kept_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_HEAP_H_
