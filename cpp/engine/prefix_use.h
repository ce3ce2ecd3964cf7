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
// A request that waits may have a reason to go on waiting. It follows another
// one whose prompt begins alike and is being computed (Follow), up to where the
// two part; or it fetches what the tiers below RAM have (Fetch), until they
// have answered or their time is over. When it starts, Resume takes over what
// is in RAM by then, and chooses the points of its prompt that others are to go
// on from. While it computes, PointsIn tells a step which of them it passes,
// and Publish hands over what the step left there. End hands over the rest, and
// lets go of those that follow. A request that gave its blocks back resumes
// again, but neither follows nor leads any more.
//
// A request leads from its first Resume to the end of its prompt or to End,
// whichever comes first, and only if it writes. It tells its followers through
// a Lead, which both sides share, so that either may go first. The prompt is
// copied once, and only where there is a prefix cache: without one all of this
// does nothing. Not thread-safe: PointsIn and Publish belong to whoever runs
// the step, the rest to the scheduler's thread between two steps.
class PrefixUse {
 public:
  using Clock = PrefixFetch::Clock;

  // Requires: the stream's transaction is open, until End() has returned. At
  // most `limit` tokens of its transcript may come from the prefix cache.
  PrefixUse(PrefixAccess access, TokenStream& stream, size_t limit);
  PrefixUse(const PrefixUse&) = delete;

  bool reads() const { return access_.reads(); }
  // Its request computes a prompt that others may wait for.
  bool leads() const {
    return lead_ && access_.writes() && lead_->reached < prompt_.size();
  }

  // ---- While the request waits ----

  // Either tells `wake_up` (prefix_changed) when it is over, but for a tier's
  // time, which ends by itself.

  // Follows `earlier` if that leads, and its prompt begins as this one does,
  // further than what is known already. Returns whether it does.
  bool Follow(PrefixUse& earlier, const std::shared_ptr<WakeUp>& wake_up);
  // Asks the tiers below RAM, the first time; returns whether it waits for
  // them.
  bool Fetch(const std::shared_ptr<WakeUp>& wake_up);
  bool follows() const {
    return leader_ && !leader_->over && leader_->reached < awaited_;
  }
  bool fetches() const { return fetch_ && fetch_->pending(); }
  // When the tiers' time is over. Requires: fetches().
  Clock::time_point fetch_deadline() const { return fetch_->deadline(); }

  // ---- While it computes ----

  // Takes over what the prefix cache has of the first `limit` tokens; returns
  // false if that is nothing. Where memory does not suffice it is.
  bool Resume(size_t limit);
  // Where a warm-up of what was taken over ends; it is the end of a step.
  size_t warm_end() const { return warm_end_; }
  // The points of a step over positions [begin, end), ascending, each once.
  std::vector<size_t> PointsIn(size_t begin, size_t end) const;
  // The step was committed up to `next`, with these points.
  void Publish(std::span<const Checkpoint> points, size_t next) noexcept;
  // One row of a prompt took so long.
  void NoteSpeed(double seconds) const;

  // ---- Where the pool is full ----

  // Has the index give up blocks of the pool, and takes no more points, which
  // need room, too; false if that was so.
  bool GiveUpIndexed();
  // Does without the prefix cache from now on; false if it did already.
  bool Leave();

  // ---- At the end, or when the request gives its blocks back ----

  // Abandons a fetch, lets go of the followers, and publishes where the
  // conversation stands if the request has `computed` anything of it.
  void End(bool computed) noexcept;

 private:
  // How far one request has got, for those that follow it.
  struct Lead {
    size_t reached = 0;
    bool over = false;
    // The positions that they wait for lie within; who is told of them.
    size_t first_awaited = std::numeric_limits<size_t>::max();
    size_t last_awaited = 0;
    std::shared_ptr<WakeUp> wake_up = nullptr;
  };

  KVCache& cache() const { return stream_.transaction().cache(); }
  bool TakeOver(size_t limit, bool again);
  void AddPoint(size_t position);
  void EndFetch();

  PrefixAccess access_;
  TokenStream& stream_;
  const size_t limit_;           // of the prompt
  std::vector<int32_t> prompt_;  // the transcript when the request came

  // While it waits.
  std::shared_ptr<const Lead> leader_;
  size_t awaited_ = 0;                  // position that the leader is to reach
  std::shared_ptr<PrefixFetch> fetch_;  // on its way, or not yet looked at
  bool fetched_ = false;                // the tiers were asked

  // Once it has started.
  bool resumed_ = false;
  std::shared_ptr<Lead> lead_;  // null: nobody can follow
  std::vector<size_t> points_;  // of the prompt, ascending
  bool takes_points_ = true;
  size_t warm_end_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_PREFIX_USE_H_
