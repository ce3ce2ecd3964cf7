#include "cache/block_pool.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/heap_trim.h"

namespace gkv {
namespace {

// Free blocks kept for reuse. A decoding conversation takes and drops a block
// of each group now and then; more than that is better off with the system.
constexpr size_t kMaxFreeBytes = size_t{16} << 20;

// The C library keeps freed blocks for itself; after so many bytes it is told
// to give them to the system. Takes about a millisecond.
constexpr size_t kTrimBytes = size_t{32} << 20;

#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
constexpr bool kStartPoisoned = true;
#else
constexpr bool kStartPoisoned = false;
#endif

size_t Rounded(size_t size_bytes) {
  return (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

BlockRef::~BlockRef() {
  if (block_ == nullptr) return;
  if (block_->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    // The block's own reference may be the pool's last one.
    const std::shared_ptr<BlockPool> pool = std::move(block_->pool);
    pool->Release(block_);
  }
}

std::shared_ptr<BlockPool> BlockPool::Create(size_t budget_bytes) {
  return std::shared_ptr<BlockPool>(new BlockPool(budget_bytes));
}

const std::shared_ptr<BlockPool>& BlockPool::Default() {
  // Never destroyed: blocks may outlive static destruction.
  static const auto* const pool = new std::shared_ptr<BlockPool>(Create());
  return *pool;
}

BlockPool::BlockPool(size_t budget_bytes)
    : budget_bytes_(budget_bytes), poison_(kStartPoisoned) {}

BlockPool::~BlockPool() { FreeRetained(); }

void BlockPool::FreeRetained() {
  for (auto& [size, blocks] : free_) {
    for (uint8_t* data : blocks) std::free(data);
  }
  free_.clear();
  free_bytes_ = 0;
}

BlockRef BlockPool::Acquire(size_t size_bytes) {
  std::unique_ptr<Block> block(
      new Block{nullptr, size_bytes, 1, shared_from_this()});
  bool poison;
  {
    std::unique_lock lock(mutex_);
    if (fail_after_ > 0 && --fail_after_ == 0) {
      throw OutOfBlocks("block pool: failure injected by a test");
    }
    if (budget_bytes_ != 0 && bytes_in_use_ + size_bytes > budget_bytes_) {
      throw OutOfBlocks(StrCat(
          "block pool: ", bytes_in_use_, " bytes are in use and ", size_bytes,
          " more are needed, expected at most ", budget_bytes_,
          " in total (drop or reset conversations, or use a larger pool)"));
    }
    const auto reusable = free_.find(size_bytes);
    if (reusable != free_.end() && !reusable->second.empty()) {
      block->data = reusable->second.back();
      reusable->second.pop_back();
      free_bytes_ -= size_bytes;
    } else {
      if (budget_bytes_ != 0 &&
          bytes_in_use_ + free_bytes_ + size_bytes > budget_bytes_) {
        FreeRetained();
      }
      block->data = static_cast<uint8_t*>(
          std::aligned_alloc(kAlignment, Rounded(size_bytes)));
      if (block->data == nullptr) {
        throw OutOfBlocks(StrCat("block pool: the system has no memory for ",
                                 size_bytes, " bytes more, ", bytes_in_use_,
                                 " are in use"));
      }
    }
    bytes_in_use_ += size_bytes;
    ++blocks_in_use_;
    poison = poison_;
  }
  if (poison) std::memset(block->data, 0xFF, size_bytes);
  return BlockRef(block.release());
}

void BlockPool::Release(Block* block) {
  bool trim = false;
  {
    std::unique_lock lock(mutex_);
    if (poison_) std::memset(block->data, 0xFF, block->size_bytes);
    bytes_in_use_ -= block->size_bytes;
    --blocks_in_use_;
    if (free_bytes_ + block->size_bytes <= kMaxFreeBytes) {
      free_[block->size_bytes].push_back(block->data);
      free_bytes_ += block->size_bytes;
      block->data = nullptr;
    } else {
      untrimmed_bytes_ += block->size_bytes;
      trim = untrimmed_bytes_ >= kTrimBytes;
      if (trim) untrimmed_bytes_ = 0;
    }
  }
  std::free(block->data);
  delete block;
  if (trim) TrimHeap();
}

size_t BlockPool::bytes_in_use() const {
  std::unique_lock lock(mutex_);
  return bytes_in_use_;
}

size_t BlockPool::blocks_in_use() const {
  std::unique_lock lock(mutex_);
  return blocks_in_use_;
}

void BlockPool::set_poison(bool poison) {
  std::unique_lock lock(mutex_);
  poison_ = poison;
}

void BlockPool::FailAfter(size_t n) {
  std::unique_lock lock(mutex_);
  fail_after_ = n;
}

}  // namespace gkv
