#ifndef GEMMAKV_CACHE_BLOCK_POOL_H_
#define GEMMAKV_CACHE_BLOCK_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gkv {

class BlockPool;

// Storage of `size` bytes shared by reference count. Content is uninitialized
// when acquired.
struct Block {
  uint8_t* data;  // aligned to 64 bytes
  size_t size_bytes;
  std::atomic<uint32_t> refs;
  std::shared_ptr<BlockPool> pool;
};

// A counted reference. Copying shares, destroying releases; both are O(1) and
// safe from any thread. A default-constructed one refers to nothing.
class BlockRef {
 public:
  BlockRef() = default;
  explicit BlockRef(Block* adopted) : block_(adopted) {}
  BlockRef(const BlockRef& other) : block_(other.block_) {
    if (block_) block_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  BlockRef(BlockRef&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)) {}
  BlockRef& operator=(BlockRef other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~BlockRef();

  explicit operator bool() const { return block_ != nullptr; }
  uint8_t* data() const { return block_->data; }
  size_t size_bytes() const { return block_->size_bytes; }
  // True if another reference exists: the block must not be written.
  bool shared() const {
    return block_->refs.load(std::memory_order_acquire) > 1;
  }
  const Block* get() const { return block_; }

 private:
  Block* block_ = nullptr;
};

// Source of blocks under one byte budget, shared by many conversations.
// Thread-safe. Keeps a bounded number of free blocks for reuse, within the
// budget; the rest goes back to the system at once.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  // `budget_bytes` 0 means no limit.
  static std::shared_ptr<BlockPool> Create(size_t budget_bytes = 0);
  ~BlockPool();

  // The pool of caches that name none. No limit.
  static const std::shared_ptr<BlockPool>& Default();

  // A block with one reference. Throws OutOfBlocks if the budget or the
  // system's memory does not allow it; nothing changes then.
  BlockRef Acquire(size_t size_bytes);

  size_t budget_bytes() const { return budget_bytes_; }
  size_t bytes_in_use() const;
  size_t blocks_in_use() const;

  // Fills freed and new blocks with 0xFF bytes (NaN in f32, bf16 and the
  // scales of int8), so that any read of an unwritten position shows. Tests
  // switch it on; builds with assertions or sanitizers start with it.
  void set_poison(bool poison);
  // Tests: the n-th Acquire from now (1 = the next) fails. 0 switches it off.
  void FailAfter(size_t n);

 private:
  friend class BlockRef;
  explicit BlockPool(size_t budget_bytes);
  void Release(Block* block);
  void FreeRetained();  // requires: mutex_ is held

  const size_t budget_bytes_;
  mutable std::mutex mutex_;
  size_t bytes_in_use_ = 0;
  size_t blocks_in_use_ = 0;
  size_t free_bytes_ = 0;
  size_t untrimmed_bytes_ = 0;  // freed since the heap was last trimmed
  size_t fail_after_ = 0;
  bool poison_;
  std::unordered_map<size_t, std::vector<uint8_t*>> free_;  // by size, LIFO
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_POOL_H_
