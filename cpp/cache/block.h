#ifndef GEMMAKV_CACHE_BLOCK_H_
#define GEMMAKV_CACHE_BLOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace gkv {

struct Block;

// The owner of blocks: a block returns to it when its last reference is gone.
class BlockOwner {
 public:
  virtual ~BlockOwner() = default;
  // Takes the block over. Called on any thread.
  virtual void Release(Block* block) noexcept = 0;
};

// Storage of `size_bytes` that is shared by reference count.
struct Block {
  // False if its bytes are those of a mapped file, which may only be read.
  bool writable() const { return !mapped; }

  uint8_t* data = nullptr;  // aligned to 64 bytes
  size_t size_bytes = 0;
  bool mapped = false;
  std::atomic<uint32_t> refs = 1;
  // How many of `refs` belong to a prefix index, which gives them up when asked
  // to.
  mutable std::atomic<uint32_t> indexed = 0;
  std::shared_ptr<BlockOwner> owner;
  Block* next = nullptr;  // of a list that the owner keeps
};

// A counted reference. Copying shares the block, destroying releases it; both
// are O(1) and safe from any thread. A default-constructed one refers to
// nothing.
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
  ~BlockRef() {
    if (block_ == nullptr) return;
    if (block_->refs.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    // The block's own reference to its owner may be the last one.
    const std::shared_ptr<BlockOwner> owner = std::move(block_->owner);
    owner->Release(block_);
  }

  explicit operator bool() const { return block_ != nullptr; }
  uint8_t* data() const { return block_->data; }
  size_t size_bytes() const { return block_->size_bytes; }
  // Whether there are exactly so many references and the storage is not
  // read-only. If false, a copy must be written instead.
  bool writable(uint32_t references = 1) const {
    return block_->writable() &&
           block_->refs.load(std::memory_order_acquire) == references;
  }
  const Block* get() const { return block_; }

 private:
  Block* block_ = nullptr;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_H_
