#ifndef GEMMAKV_STORE_PREFIX_WRITER_H_
#define GEMMAKV_STORE_PREFIX_WRITER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/worker.h"
#include "store/block_store.h"
#include "store/object_chain.h"
#include "store/prefix_index.h"

namespace gkv {

using PrefixTiers = std::vector<std::shared_ptr<BlockStore>>;

// What one conversation added to the index.
struct PrefixAddition {
  PrefixId id;
  std::shared_ptr<const KvLayout> layout;
  std::vector<int32_t> tokens;  // up to the end of the last entry, or more
  PrefixNews news;
};

struct PrefixWriterStats {
  uint64_t queued = 0;        // objects that wait
  uint64_t queued_bytes = 0;  // of their blocks
  uint64_t written = 0;       // objects that a tier took
  uint64_t dropped = 0;       // because the queue or a pool was full
  uint64_t failed = 0;
};

// Writes through to the tiers below RAM what is new in the index, on a worker.
// Of one addition: pages from the root on, window pages, the resume points they
// belong to, so that a reader who finds a resume point finds the rest.
//
// What is queued is referred to, so that it may go from an index that is
// smaller than what is being written. It goes, unwritten, where a pool is full:
// so the queue never makes a request fail. Thread-safe. No lock is held while a
// tier is asked. In a child of fork() nothing is written.
class PrefixWriter : public std::enable_shared_from_this<PrefixWriter> {
 public:
  using Clock = Worker::Clock;

  // The oldest addition goes where more than `max_bytes` of blocks are queued.
  PrefixWriter(std::shared_ptr<PrefixIndex> index, PrefixTiers tiers,
               size_t max_bytes);
  // Requires: closed.
  ~PrefixWriter();
  PrefixWriter(const PrefixWriter&) = delete;

  // Queues it. Throws std::bad_alloc, std::system_error.
  void Write(PrefixAddition addition);
  // Queues an object that was found below for the first `tiers` tiers.
  void Promote(const ObjectKey& key, StoredBytes object, size_t tiers);
  // As BlockHolder says. Waits for what is being encoded.
  bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed);
  // Returns when all that is queued is written, or at `until`: false.
  bool Flush(Clock::time_point until);
  // Forgets what is queued. Returns when what is being written is written, or
  // at `until`: false.
  bool Drop(Clock::time_point until);
  // Writes what is queued, until `until`. Nothing is written afterwards. Says
  // how many objects were not, with all of what the worker was at: its thread
  // is left in a tier that does not answer, and holds only this and that.
  uint64_t Close(Clock::time_point until);
  PrefixWriterStats stats() const;

 private:
  struct Job;
  struct Item;

  void WriteQueue();
  void Run(Job& job);
  std::vector<Item> ItemsOf(const Job& job, const ObjectChain& chain);
  void FindMissing(Job& job, std::span<const Item> items);
  std::optional<StoredBytes> Encode(Job& job, const Item& item);
  void Put(const ObjectKey& key, const StoredBytes& object,
           std::span<const uint8_t> to);
  void Enqueue(std::unique_ptr<Job> job);
  void MakeRoom(std::vector<std::unique_ptr<Job>>& victims) REQUIRES(mutex_);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixTiers tiers_;
  const size_t max_bytes_;

  mutable Mutex mutex_{AtFork::kWaits};
  Condition changed_{mutex_};
  std::deque<std::unique_ptr<Job>> queue_ GUARDED_BY(mutex_);
  Job* current_ GUARDED_BY(mutex_) = nullptr;  // that the worker is at
  uint64_t ended_ GUARDED_BY(mutex_) = 0;  // jobs that it has been at
  bool encoding_ GUARDED_BY(mutex_) = false;   // the worker refers to blocks
  // The worker looks at the queue, or is going to.
  bool busy_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  // The worker was, in a tier that does not answer.
  bool left_ GUARDED_BY(mutex_) = false;
  PrefixWriterStats stats_ GUARDED_BY(mutex_);

  Worker worker_;  // its task shares this object
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_WRITER_H_
