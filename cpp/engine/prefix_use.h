#ifndef GEMMAKV_ENGINE_PREFIX_USE_H_
#define GEMMAKV_ENGINE_PREFIX_USE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/token_stream.h"
#include "store/prefix_cache.h"

namespace gkv {

// What one request does with the prefix cache, from its arrival to its end.
//
// A waiting request may have a reason to go on waiting. It follows an earlier
// request whose prompt begins alike and is being computed (Follow), up to the
// position where the two prompts part. Or it fetches what the tiers below RAM
// have (Fetch), until they have answered or their time is over. When the
// request starts, Resume takes over what is in RAM by then, and chooses the
// points of its prompt at which others are to resume. While it computes,
// PointsIn tells a step which of these points it passes, and Publish hands over
// what the step left there. End hands over the rest and releases the followers.
// A request that was preempted resumes again, but neither follows nor leads any
// more.
//
// A request leads from its first Resume to the end of its prompt or to End,
// whichever comes first, and only if it writes. It tells its followers through
// a Lead, which both sides share, so that either may be destroyed first. The
// prompt is copied once, and only if there is a prefix cache: without one, none
// of these functions does anything. Not thread-safe: PointsIn and Publish
// belong to the thread that runs the step, the rest to the scheduler's thread
// between two steps.
class PrefixUse {
 public:
  using Clock = PrefixFetch::Clock;

  // Requires: the stream's transaction is open until End() has returned. At
  // most `limit` tokens of its transcript may come from the prefix cache.
  PrefixUse(PrefixAccess access, TokenStream& stream, size_t limit);
  PrefixUse(const PrefixUse&) = delete;

  bool reads() const { return access_.reads(); }
  // Whether the request computes a prompt that others may wait for.
  bool leads() const {
    return lead_ && access_.writes() && lead_->reached < prompt_.size();
  }

  // ---- While the request waits ----

  // Both set `wake_up`'s prefix_changed when the wait is over, except when the
  // time of a tier runs out.

  // Follows `earlier` if it leads and its prompt shares more with this one than
  // is known already. Returns whether it does.
  bool Follow(PrefixUse& earlier, const std::shared_ptr<WakeUp>& wake_up);
  // Asks the tiers below RAM, on the first call only. Returns whether the
  // request waits for them.
  bool Fetch(const std::shared_ptr<WakeUp>& wake_up);
  bool follows() const {
    return leader_ && !leader_->over && leader_->reached < awaited_;
  }
  bool fetches() const { return fetch_ && fetch_->pending(); }
  // Returns when the tiers' time is over. Requires: fetches().
  Clock::time_point fetch_deadline() const { return fetch_->deadline(); }

  // ---- While it computes ----

  // Takes over what the prefix cache has of the first `limit` tokens. Returns
  // false if that is nothing, or if there is no memory.
  bool Resume(size_t limit);
  // Returns where the warm-up of what was taken over ends. A step ends there.
  size_t warm_end() const { return warm_end_; }
  // Returns the points of a step over positions [begin, end), ascending, each
  // once.
  std::vector<size_t> PointsIn(size_t begin, size_t end) const;
  // Publishes what a step left at these points. The step was committed up to
  // `next`.
  void Publish(std::span<const Checkpoint> points, size_t next) noexcept;
  // Notes how long one row of a prompt took.
  void NoteSpeed(double seconds) const;

  // ---- Where the pool is full ----

  // Has the index give up blocks of the pool, and stops taking points, which
  // need room, too. Returns false if neither made a difference.
  bool GiveUpIndexed();
  // Stops using the prefix cache. Returns false if the request did not use it.
  bool Leave();

  // ---- At the end, or when the request gives its blocks back ----

  // Abandons a fetch, releases the followers, and publishes the end of the
  // conversation if the request has `computed` anything of it.
  void End(bool computed) noexcept;

 private:
  // How far one request has got, for its followers.
  struct Lead {
    size_t reached = 0;
    bool over = false;
    // The range of the positions that followers wait for.
    size_t first_awaited = std::numeric_limits<size_t>::max();
    size_t last_awaited = 0;
    std::shared_ptr<WakeUp> wake_up = nullptr;
  };

  Conversation& cache() const { return stream_.transaction().cache(); }
  bool TakeOver(size_t limit, bool again);
  void AddPoint(size_t position);
  void AddNearPoints(size_t length, size_t next);
  void EndFetch();

  PrefixAccess access_;
  TokenStream& stream_;
  const size_t limit_;           // of the prompt
  std::vector<int32_t> prompt_;  // the transcript when the request came

  // While it waits.
  std::shared_ptr<const Lead> leader_;
  size_t awaited_ = 0;                  // the leader is to reach this position
  std::shared_ptr<PrefixFetch> fetch_;  // under way, or not yet taken
  bool fetched_ = false;                // the tiers were asked

  // Once it has started.
  bool resumed_ = false;
  std::shared_ptr<Lead> lead_;  // null: nobody can follow
  std::vector<size_t> points_;  // of the prompt, ascending
  // The point that RAM alone keeps, since nobody asks other tiers for it; 0:
  // there is none.
  size_t ram_point_ = 0;
  bool takes_points_ = true;
  size_t warm_end_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_PREFIX_USE_H_
