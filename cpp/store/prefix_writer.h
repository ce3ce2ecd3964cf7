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
  uint64_t queued = 0;        // objects in the queue
  uint64_t queued_bytes = 0;  // of their blocks
  uint64_t written = 0;       // objects that a tier took
  uint64_t dropped = 0;       // because the queue or a pool was full
  uint64_t failed = 0;
};

// Writes what is new in the index through to the tiers below RAM, on a worker.
// It writes an addition in this order: pages from the root on, window pages,
// the resume points that they belong to. So a reader that finds a resume point
// finds the rest.
//
// Write and Promote queue jobs; the worker takes one after the other
// (WriteQueue), asks the tiers which objects they lack, encodes these and puts
// them there. The queue holds references to blocks, so that these may be
// evicted from an index that is smaller than what is being written. If a pool
// is full, GiveUp drops queued jobs, unwritten: the queue never makes a request
// fail. Thread-safe: mutex_ guards the queue and the present job; no lock is
// held while a tier is called. In a child of fork() nothing is written.
class PrefixWriter : public std::enable_shared_from_this<PrefixWriter> {
 public:
  using Clock = Worker::Clock;

  // The oldest addition is dropped if more than `max_bytes` of blocks are
  // queued.
  PrefixWriter(std::shared_ptr<PrefixIndex> index, PrefixTiers tiers,
               size_t max_bytes);
  // Requires: closed.
  ~PrefixWriter();
  PrefixWriter(const PrefixWriter&) = delete;

  // Queues an addition. Throws std::bad_alloc, std::system_error.
  void Write(PrefixAddition addition);
  // Queues an object that was found in a lower tier for the first `tiers`
  // tiers.
  void Promote(const ObjectKey& key, StoredBytes object, size_t tiers);
  // Drops jobs that refer to blocks of `owner`, as BlockHolder says. Waits for
  // an object that is being encoded.
  bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed);
  // Waits until everything queued is written. Returns false if it is not at
  // `until`.
  bool Flush(Clock::time_point until);
  // Drops the queue and waits for the write that is under way. Returns false if
  // that has not ended at `until`.
  bool Drop(Clock::time_point until);
  // Writes what is queued, until `until`; nothing is written afterwards.
  // Returns the number of objects that were not written, all of the present job
  // included. The thread of a tier that does not answer is left alone, and
  // holds only the writer and that job.
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
  Job* current_ GUARDED_BY(mutex_) = nullptr;  // of the worker
  uint64_t ended_ GUARDED_BY(mutex_) = 0;  // jobs that the worker has finished
  // the worker holds references to blocks
  bool encoding_ GUARDED_BY(mutex_) = false;
  // The worker looks at the queue, or is about to.
  bool busy_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  // The worker was left in a tier that does not answer.
  bool left_ GUARDED_BY(mutex_) = false;
  PrefixWriterStats stats_ GUARDED_BY(mutex_);

  Worker worker_;  // its task shares this object
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_WRITER_H_
