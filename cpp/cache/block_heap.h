#ifndef GEMMAKV_CACHE_BLOCK_HEAP_H_
#define GEMMAKV_CACHE_BLOCK_HEAP_H_

#include <cstddef>
#include <unordered_map>

#include "cache/block.h"

namespace gkv {

// Blocks from the system's memory. A bounded number of freed blocks is kept for
// reuse, by size, the last one first. Not thread-safe.
class BlockHeap {
 public:
  BlockHeap() = default;
  ~BlockHeap() { Clear(); }
  BlockHeap(const BlockHeap&) = delete;
  BlockHeap& operator=(const BlockHeap&) = delete;

  // Returns a block with one reference and no owner, and leaves at most `room`
  // bytes of kept blocks. Returns null if the system has no memory.
  Block* Allocate(size_t size_bytes, size_t room) noexcept;
  // Keeps a freed block. Returns false if it should go back to the system: the
  // caller deletes it when it holds no lock. Requires: from Allocate.
  bool Keep(Block* block) noexcept;
  static void Delete(Block* block) noexcept;

 private:
  void Clear() noexcept;

  size_t kept_bytes_ = 0;
  // A size is added when it is first allocated, so that Keep allocates nothing.
  std::unordered_map<size_t, Block*> kept_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_HEAP_H_
