#include "cache/block_pool.h"

#include <limits>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/heap_trim.h"

namespace gkv {
namespace {

// The most reclaims in a row. Blocks that were freed for one thread may be
// taken by another; so often only if somebody reports bytes that it did not
// free.
constexpr int kMaxReclaims = 16;

thread_local int optional_work = 0;  // how deep

}  // namespace

OptionalWork::OptionalWork() noexcept { ++optional_work; }
OptionalWork::~OptionalWork() { --optional_work; }

std::shared_ptr<BlockPool> BlockPool::Create(size_t budget_bytes) {
  return std::shared_ptr<BlockPool>(new BlockPool(budget_bytes));
}

const std::shared_ptr<BlockPool>& BlockPool::Default() {
  // Never destroyed: blocks may outlive static destruction.
  static const auto* const pool = new std::shared_ptr<BlockPool>(Create());
  return *pool;
}

BlockRef BlockPool::Acquire(size_t size_bytes) {
  if (failures_.Fails()) {
    throw CacheFull("block pool: failure injected by a test");
  }
  size_t missing = 0;
  Block* block = TryAcquire(size_bytes, missing);
  if (block == nullptr) block = AcquireReclaimed(size_bytes);
  block->owner = shared_from_this();
  poison_.Fill(*block);
  return BlockRef(block);
}

Block* BlockPool::TryAcquire(size_t size_bytes, size_t& missing) {
  MutexLock lock(mutex_);
  size_t room = std::numeric_limits<size_t>::max();
  if (budget_bytes_ != 0) {
    if (bytes_in_use_ + size_bytes > budget_bytes_) {
      missing = bytes_in_use_ + size_bytes - budget_bytes_;
      return nullptr;
    }
    room = budget_bytes_ - bytes_in_use_ - size_bytes;
  }
  Block* const block = heap_.Allocate(size_bytes, room);
  if (block == nullptr) {
    missing = size_bytes;
    return nullptr;
  }
  bytes_in_use_ += size_bytes;
  ++blocks_in_use_;
  return block;
}

// One thread at a time asks the reclaimers: a second one would find them busy
// with the first, and give up although there is enough for both.
Block* BlockPool::AcquireReclaimed(size_t size_bytes) {
  // Nothing is given up for a block that exceeds the whole budget.
  const bool hopeless = budget_bytes_ != 0 && size_bytes > budget_bytes_;
  MutexLock turn(reclaiming_);
  for (int reclaims = 0;; ++reclaims) {
    size_t missing = 0;
    Block* const block = TryAcquire(size_bytes, missing);
    if (block != nullptr) return block;
    if (hopeless || reclaims == kMaxReclaims || Reclaim(missing) == 0) {
      ThrowFull(size_bytes);
    }
  }
}

void BlockPool::ThrowFull(size_t size_bytes) const {
  const size_t in_use = bytes_in_use();
  if (budget_bytes_ != 0 && in_use + size_bytes > budget_bytes_) {
    size_t kept = 0;
    for (const std::weak_ptr<Reclaimer>& candidate : reclaimers()) {
      const std::shared_ptr<Reclaimer> reclaimer = candidate.lock();
      if (reclaimer) kept += reclaimer->KeptBytes();
    }
    throw CacheFull(
        StrCat("block pool: ", in_use, " bytes are in use",
               kept > 0 ? StrCat(", ", kept, " of them pinned,") : "", " and ",
               size_bytes, " more are needed, expected at most ", budget_bytes_,
               " in total (", kept > 0 ? "unpin prompts, " : "",
               "drop or reset conversations, or use a larger pool)"));
  }
  throw CacheFull(StrCat("block pool: the system has no memory for ",
                         size_bytes, " bytes more, ", in_use, " are in use"));
}

std::vector<std::weak_ptr<Reclaimer>> BlockPool::reclaimers() const {
  MutexLock lock(mutex_);
  return reclaimers_;
}

size_t BlockPool::Reclaim(size_t bytes) {
  size_t freed = 0;
  try {
    for (const std::weak_ptr<Reclaimer>& candidate : reclaimers()) {
      if (freed >= bytes) break;
      const std::shared_ptr<Reclaimer> reclaimer = candidate.lock();
      if (!reclaimer) continue;
      if (optional_work > 0 && !reclaimer->gives_way_readily()) continue;
      freed += reclaimer->Reclaim(bytes - freed);
    }
  } catch (const std::bad_alloc&) {
    // There is no memory for giving up memory.
  }
  return freed;
}

void BlockPool::AddReclaimer(std::weak_ptr<Reclaimer> reclaimer) {
  MutexLock lock(mutex_);
  if (reclaimers_.size() == reclaimers_.capacity()) {
    std::erase_if(reclaimers_, [](const auto& r) { return r.expired(); });
    reclaimers_.reserve(2 * reclaimers_.size() + 1);
  }
  reclaimers_.push_back(std::move(reclaimer));
}

void BlockPool::Release(Block* block) noexcept {
  poison_.Fill(*block);
  {
    MutexLock lock(mutex_);
    bytes_in_use_ -= block->size_bytes;
    --blocks_in_use_;
    if (heap_.Keep(block)) return;
  }
  GiveBack(block->data, block->size_bytes);
  BlockHeap::Delete(block);
}

size_t BlockPool::bytes_in_use() const {
  MutexLock lock(mutex_);
  return bytes_in_use_;
}

size_t BlockPool::blocks_in_use() const {
  MutexLock lock(mutex_);
  return blocks_in_use_;
}

}  // namespace gkv
