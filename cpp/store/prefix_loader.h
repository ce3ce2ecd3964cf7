#ifndef GEMMAKV_STORE_PREFIX_LOADER_H_
#define GEMMAKV_STORE_PREFIX_LOADER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/fork_guard.h"
#include "base/worker.h"
#include "store/block_store.h"
#include "store/object_chain.h"
#include "store/prefix_index.h"
#include "store/prefix_writer.h"

namespace gkv {

// What is asked of the tiers below RAM.
struct PrefixRequest {
  PrefixId id;
  std::shared_ptr<const KvLayout> layout;
  std::shared_ptr<BlockPool> pool;  // for copies
  std::vector<int32_t> tokens;
  size_t limit = 0;  // at most so many of them
  std::vector<int32_t> turn_ends;
  std::vector<size_t> boundaries;
  size_t start = 0;               // where computing would begin without it
  double seconds = 0;             // to compute a token
  std::function<void()> on_done;  // on a thread of the loader's
};

// One request on its way. Thread-safe.
class PrefixFetch {
 public:
  using Clock = std::chrono::steady_clock;

  PrefixFetch(PrefixRequest request, Clock::duration time_out)
      : request_(std::move(request)), time_out_(time_out) {
    NoteProgress();
  }
  PrefixFetch(const PrefixFetch&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Later whenever a tier has answered.
  Clock::time_point deadline() const { return deadline_.load(); }
  // Whether there is something to wait for.
  bool pending() const { return !done() && Clock::now() < deadline(); }
  // Nobody waits for it any more.
  void Abandon() { abandoned_.store(true); }
  // Until it is done or its time is over.
  void Wait();

  // Pages one after the other, and the resume point behind them. Empty if there
  // is nothing, or it was given up since.
  PrefixNews Take();
  // It was there, and is as quick to compute.
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

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool given_up_ = false;
  PrefixNews found_;
};

struct PrefixTierStats {
  uint64_t loads = 0;     // objects that it gave and that were right
  uint64_t damaged = 0;   // that were not
  uint64_t timeouts = 0;  // fetches that were left while it was asked
  double latency = 0;     // seconds of a question, lately; 0: not known
  double rate = 0;        // bytes a second, lately; 0: not known
};

struct PrefixLoaderStats {
  uint64_t fetches = 0;
  uint64_t hits = 0;
  uint64_t timeouts = 0;
  uint64_t cheaper = 0;
  uint64_t failed = 0;  // for want of memory
  std::vector<PrefixTierStats> tiers;
};

// Asks the tiers below RAM for the longest resume point, checks every object
// against what it must be, and takes them into the index. Two workers do that
// at a time; another one takes the place of one that a tier does not answer.
// Thread-safe. No lock is held while a tier is asked. In a child of fork() no
// tier is.
class PrefixLoader : public std::enable_shared_from_this<PrefixLoader> {
 public:
  using Clock = PrefixFetch::Clock;

  // `names` are those of the tiers; one may take `time_out` to answer.
  PrefixLoader(std::shared_ptr<PrefixIndex> index, PrefixTiers tiers,
               std::vector<PrefixTier> names,
               std::shared_ptr<PrefixWriter> writer,
               std::chrono::milliseconds time_out, bool weighs);
  PrefixLoader(const PrefixLoader&) = delete;

  // Null if there is no tier to ask now. Throws std::bad_alloc,
  // std::system_error.
  std::shared_ptr<PrefixFetch> Fetch(PrefixRequest request);
  // Leaves one that is not done at its deadline. Its tier is asked no more
  // until it has answered, and some time after.
  void TimedOut(PrefixFetch& fetch);
  // As BlockHolder says: of what was fetched and nobody has taken over yet.
  bool GiveUp(const BlockOwner* owner, size_t bytes, size_t& freed);
  // Ends all fetches. Waits for a tier that is asked, until `until`: the thread
  // is left then, and holds only this and its fetch. Must come before the end.
  void Close(Clock::time_point until);
  PrefixLoaderStats stats() const;

 private:
  // An object that was found, and checked.
  struct Piece {
    StoredBytes object;
    ObjectHead head;
    size_t tier = 0;
  };
  struct Wanted {
    ObjectKey key;
    ObjectHead head;
  };
  // A worker, and what it is at. Its task shares the loader, which has this.
  struct Hand {
    PrefixFetch* fetch = nullptr;
    size_t calling = 0;         // tier + 1
    Clock::time_point since{};  // it is
    bool busy = false;          // looks for fetches, or is at one
    bool lost = false;          // a tier does not answer it
    Worker worker;
  };
  // One tier as it was lately.
  struct Pace {
    PrefixTierStats stats;
    size_t hung = 0;  // workers that were left in it
    Clock::time_point suspended_until{};
  };

  void Dispatch();
  void RunQueue(Hand& hand);
  void Finish(PrefixFetch& fetch, bool failed);
  void LeaveHung();
  std::shared_ptr<PrefixFetch> NextFetch();
  void Run(Hand& hand, PrefixFetch& fetch);
  bool TryPoint(Hand& hand, PrefixFetch& fetch, const ObjectChain& chain,
                size_t position, size_t begin);
  std::vector<std::optional<Piece>> LoadAll(Hand& hand, PrefixFetch& fetch,
                                            std::span<const Wanted> wanted);
  bool Keep(PrefixFetch& fetch, bool point, size_t end, PrefixPart part);
  bool WorthIt(PrefixFetch& fetch, size_t tier, size_t begin, size_t position);
  bool Usable(size_t tier, Clock::time_point now) const;
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

  mutable std::mutex mutex_;  // guards what follows
  std::deque<std::shared_ptr<PrefixFetch>> queue_;
  std::vector<std::weak_ptr<PrefixFetch>> fetches_;  // that may hold blocks
  std::list<Hand> hands_;  // two, and those that are lost
  std::vector<Pace> paces_;
  bool closing_ = false;
  PrefixLoaderStats stats_;
  const pid_t pid_ = getpid();  // of the process that the threads are in
  const ForkGuard guard_{mutex_};
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_PREFIX_LOADER_H_
