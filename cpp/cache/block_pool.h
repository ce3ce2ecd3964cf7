#ifndef GEMMAKV_CACHE_BLOCK_POOL_H_
#define GEMMAKV_CACHE_BLOCK_POOL_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "cache/block.h"
#include "cache/block_faults.h"
#include "cache/block_heap.h"

namespace gkv {

// A holder of blocks that it can do without.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  // Gives up at least `bytes` of the pool's blocks if it can. Returns the bytes
  // that are freed: those of blocks that nobody else refers to. Runs on a
  // thread that needs blocks and may hold the state of a conversation: never
  // waits for another one, acquires nothing.
  virtual size_t Reclaim(size_t bytes) = 0;
  // Whether it is also asked for optional work.
  virtual bool gives_way_readily() const { return true; }
  // The bytes of the pool's blocks that it was told to keep, for messages.
  virtual size_t KeptBytes() { return 0; }
};

// While it lives, this thread acquires blocks for work that can be left out:
// only reclaimers that give way readily are asked.
class OptionalWork {
 public:
  OptionalWork() noexcept;
  ~OptionalWork();
  OptionalWork(const OptionalWork&) = delete;
};

// The source of blocks under one byte budget, shared by many conversations.
//
// Acquire hands out a block with one reference; the last reference returns it
// to the pool (Release). The pool keeps a bounded number of free blocks for
// reuse, within the budget (BlockHeap), and returns the rest to the system at
// once. If a block does not fit the budget, or the system has no memory,
// Acquire asks the reclaimers in the order in which they were added, and throws
// CacheFull if they do not free enough. Blocks in use and kept blocks together
// never exceed the budget.
//
// Thread-safe. mutex_ guards the counts, the heap and the list of reclaimers;
// it is the innermost of all mutexes, and is not held while reclaimers run.
// reclaiming_ is: so one thread reclaims at a time.
class BlockPool final : public BlockOwner,
                        public std::enable_shared_from_this<BlockPool> {
 public:
  // `budget_bytes` 0 means no limit.
  static std::shared_ptr<BlockPool> Create(size_t budget_bytes = 0);

  // The pool of caches that name none. No limit.
  static const std::shared_ptr<BlockPool>& Default();

  // Returns a block with one reference, its content uninitialized. Throws
  // CacheFull if the budget or the system's memory does not allow it and
  // reclaimers do not free enough.
  BlockRef Acquire(size_t size_bytes);
  void Release(Block* block) noexcept override;

  // Adds a reclaimer, which is asked after the others as long as it exists.
  void AddReclaimer(std::weak_ptr<Reclaimer> reclaimer);

  size_t budget_bytes() const { return budget_bytes_; }
  size_t bytes_in_use() const;
  size_t blocks_in_use() const;

  void set_poison(bool poison) { poison_.set_on(poison); }
  // For tests: the n-th Acquire from now (1 = the next) fails. 0 switches this
  // off.
  void FailAfter(size_t n) { failures_.FailAfter(n); }

 private:
  explicit BlockPool(size_t budget_bytes) : budget_bytes_(budget_bytes) {}
  // Returns null if there is no room; `missing` is how many bytes less would
  // have to be in use.
  Block* TryAcquire(size_t size_bytes, size_t& missing);
  Block* AcquireReclaimed(size_t size_bytes);
  size_t Reclaim(size_t bytes);
  std::vector<std::weak_ptr<Reclaimer>> reclaimers() const;
  [[noreturn]] void ThrowFull(size_t size_bytes) const;

  const size_t budget_bytes_;
  BlockPoison poison_;
  FailureInjector failures_;
  ForkScope scope_;
  Mutex reclaiming_{scope_};  // held while reclaimers are asked
  mutable Mutex mutex_{scope_};
  size_t bytes_in_use_ GUARDED_BY(mutex_) = 0;
  size_t blocks_in_use_ GUARDED_BY(mutex_) = 0;
  BlockHeap heap_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Reclaimer>> reclaimers_ GUARDED_BY(mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_POOL_H_
