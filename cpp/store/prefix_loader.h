#ifndef GEMMAKV_STORE_PREFIX_LOADER_H_
#define GEMMAKV_STORE_PREFIX_LOADER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/own_process.h"
#include "base/worker.h"
#include "store/block_store.h"
#include "store/object_chain.h"
#include "store/prefix_index.h"
#include "store/prefix_writer.h"

namespace gkv {

// A question to the tiers below RAM.
struct PrefixRequest {
  PrefixId id;
  std::shared_ptr<const KvLayout> layout;
  std::shared_ptr<BlockPool> pool;  // for copies
  std::vector<int32_t> tokens;
  size_t limit = 0;  // the answer covers at most so many tokens
  std::vector<int32_t> turn_ends;
  std::vector<size_t> boundaries;
  size_t start = 0;  // where computing would begin without an answer
  double seconds = 0;             // to compute a token
  std::function<void()> on_done;  // called on a thread of the loader
};

// One request to the tiers. Thread-safe.
class PrefixFetch {
 public:
  using Clock = std::chrono::steady_clock;

  PrefixFetch(PrefixRequest request, Clock::duration time_out)
      : request_(std::move(request)), time_out_(time_out) {
    NoteProgress();
  }
  PrefixFetch(const PrefixFetch&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Moves later whenever a tier has answered.
  Clock::time_point deadline() const { return deadline_.load(); }
  // Whether waiting for it makes sense.
  bool pending() const { return !done() && Clock::now() < deadline(); }
  // Says that nobody waits for it any more.
  void Abandon() { abandoned_.store(true); }
  // Waits until it is done or its time is over.
  void Wait();

  // Returns consecutive pages, and the resume point after them. Empty if there
  // is nothing, or if it was given up for a full pool.
  PrefixNews Take();
  // Whether a tier has the prefix, but computing it is as quick.
  bool cheaper() const { return cheaper_.load(); }

 private:
  friend class PrefixLoader;

  void NoteProgress() { deadline_.store(Clock::now() + time_out_); }

  const PrefixRequest request_;
  const Clock::duration time_out_;
  std::atomic<Clock::time_point> deadline_;
  std::atomic<bool> done_ = false;
  std::atomic<bool> abandoned_ = false;
  std::atomic<bool> cheaper_ = false;

  Mutex mutex_{AtFork::kLeaves};
  Condition changed_{mutex_};
  bool given_up_ GUARDED_BY(mutex_) = false;
  PrefixNews found_ GUARDED_BY(mutex_);
};

struct PrefixTierStats {
  uint64_t loads = 0;     // sound objects that it gave
  uint64_t damaged = 0;   // objects that were not sound
  uint64_t timeouts = 0;  // calls that were given up
  double latency = 0;     // seconds of a call, lately; 0: not known
  double rate = 0;        // bytes a second, lately; 0: not known
};

struct PrefixLoaderStats {
  uint64_t fetches = 0;
  uint64_t hits = 0;
  uint64_t timeouts = 0;
  uint64_t cheaper = 0;
  uint64_t failed = 0;  // without memory
  std::vector<PrefixTierStats> tiers;
};

// Asks the tiers below RAM for the longest resume point, checks every object
// against what it must be, and takes the objects into the index. Two workers do
// that at a time. If a tier does not answer a worker, another worker takes its
// place, and the tier is not asked until it has answered, and for some time
// after that.
//
// Fetch queues a question. Workers take questions from the queue (RunFetches),
// those that begin alike one after the other. Finish says in the PrefixFetch
// that the question is answered. TimedOut gives a question up. Thread-safe:
// mutex_ guards the queue, the workers and the times of tiers, and each
// PrefixFetch has a mutex for what was found; no lock is held while a tier is
// called. In a child of fork() no tier is called.
class PrefixLoader : public std::enable_shared_from_this<PrefixLoader> {
 public:
  using Clock = PrefixFetch::Clock;

  // `names` are those of the tiers. A tier may take `time_out` to answer.
  PrefixLoader(std::shared_ptr<PrefixIndex> index, PrefixTiers tiers,
               std::vector<PrefixTier> names,
               std::shared_ptr<PrefixWriter> writer,
               std::chrono::milliseconds time_out, bool weighs);
  PrefixLoader(const PrefixLoader&) = delete;

  // Queues a question. Returns null if there is no tier to ask now. Throws
  // std::bad_alloc, std::system_error.
  std::shared_ptr<PrefixFetch> Fetch(PrefixRequest request);
  // Gives up a fetch that is not done at its deadline. Its tier is not asked
  // until it has answered, and for some time after that.
  void TimedOut(PrefixFetch& fetch);
  // Gives up blocks that were fetched and that nobody has taken over yet, as
  // BlockHolder says.
  bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed);
  // Ends all fetches. Waits for calls of tiers until `until`; a thread that is
  // still in one is left alone, and holds only the loader and its fetch. Must
  // be called before the loader is destroyed.
  void Close(Clock::time_point until);
  PrefixLoaderStats stats() const;

 private:
  // An object that was found and checked.
  struct Piece {
    StoredBytes object;
    ObjectHead head;
    size_t tier = 0;
  };
  struct Wanted {
    ObjectKey key;
    ObjectHead head;
  };
  // A worker and its present task, which shares the loader.
  struct Hand {
    PrefixFetch* fetch = nullptr;
    size_t calling = 0;         // tier + 1
    Clock::time_point since{};  // when that began
    bool busy = false;          // looks for fetches, or works on one
    bool lost = false;          // a tier does not answer it
    Worker worker;
  };
  // Recent times of one tier.
  struct Pace {
    PrefixTierStats stats;
    size_t hung = 0;  // lost workers in it
    Clock::time_point suspended_until{};
  };

  void Dispatch() REQUIRES(mutex_);
  void RunFetches(Hand& hand);
  void Finish(PrefixFetch& fetch, bool failed);
  void LeaveHung() REQUIRES(mutex_);
  std::shared_ptr<PrefixFetch> NextFetch() REQUIRES(mutex_);
  void Run(Hand& hand, PrefixFetch& fetch);
  bool TryPoint(Hand& hand, PrefixFetch& fetch, const ObjectChain& chain,
                size_t position, size_t begin);
  std::vector<std::optional<Piece>> LoadAll(Hand& hand, PrefixFetch& fetch,
                                            std::span<const Wanted> wanted);
  bool Keep(PrefixFetch& fetch, bool point, size_t end, PrefixPart part);
  bool WorthIt(PrefixFetch& fetch, size_t tier, size_t begin, size_t position);
  bool Usable(size_t tier, Clock::time_point now) const REQUIRES(mutex_);
  template <typename Fn>
  bool Ask(Hand& hand, size_t tier, const Fn& ask);
  void NoteLatency(size_t tier, double seconds);
  void NoteRate(size_t tier, double seconds, size_t bytes);

  const std::shared_ptr<PrefixIndex> index_;
  const PrefixTiers tiers_;
  const std::vector<PrefixTier> names_;
  const std::shared_ptr<PrefixWriter> writer_;
  const std::chrono::milliseconds time_out_;
  const bool weighs_;

  mutable Mutex mutex_{AtFork::kWaits};
  std::deque<std::shared_ptr<PrefixFetch>> queue_ GUARDED_BY(mutex_);
  // The fetches that may hold blocks.
  std::vector<std::weak_ptr<PrefixFetch>> fetches_ GUARDED_BY(mutex_);
  // Two workers, and the lost ones.
  std::list<Hand> hands_ GUARDED_BY(mutex_);
  std::vector<Pace> paces_ GUARDED_BY(mutex_);
  bool closing_ GUARDED_BY(mutex_) = false;
  PrefixLoaderStats stats_ GUARDED_BY(mutex_);
  const OwnProcess process_;  // that the threads belong to
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_LOADER_H_
