#ifndef GEMMAKV_CACHE_CHECKPOINTS_H_
#define GEMMAKV_CACHE_CHECKPOINTS_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cache/group_cache.h"

namespace gkv {

// What the groups that forget held at one position, by reference to their
// blocks: computing can go on from there at any later time. Immutable; forks
// share it.
struct Checkpoint {
  size_t position = 0;  // computed positions then
  size_t length = 0;    // tokens of the transcript then; the rest was pending
  std::shared_ptr<const GroupSet> groups;
};

// The checkpoints of one conversation, ascending by position, under a byte
// budget. Copying shares them: O(checkpoints). Not thread-safe.
class CheckpointList {
 public:
  bool empty() const { return list_.empty(); }
  const std::vector<Checkpoint>& list() const { return list_; }

  // Adds a checkpoint, in place of one at the same position, and evicts until
  // all of them together refer to at most `budget_bytes` of blocks. Old ones
  // thin out first: of those between the first and the last, the one is evicted
  // whose loss opens the smallest gap for its age, so that gaps grow with the
  // distance from the end. The first (the end of turn 0) is evicted last.
  // Returns false if the new one does not stay; if it alone is too large,
  // nothing changes. A checkpoint that refers to nothing is not needed: returns
  // true and changes nothing. Lengths stay ascending: the new one's is at least
  // that of the one before.
  bool Add(Checkpoint checkpoint, size_t budget_bytes);
  // Takes out those whose loss costs least, in the order of Add, until at least
  // `bytes` of blocks of `owner` lose their last reference when the result is
  // destroyed. Sets `freed` to the bytes of blocks that do, or that only prefix
  // indexes still refer to. Blocks that forks or the conversation itself hold
  // as well stay.
  std::vector<Checkpoint> GiveUp(const BlockOwner* owner, size_t bytes,
                                 size_t& freed);
  // Returns the last one with position <= `position`; null if there is none.
  const Checkpoint* AtOrBefore(size_t position) const;
  // Returns the last one of a transcript of `length` tokens; null if there is
  // none.
  const Checkpoint* OfLength(size_t length) const;
  // Drops those after the end of a transcript that was cut to `length`.
  void Truncate(size_t length);

  // The bytes of all blocks that they refer to, each counted once.
  size_t nbytes() const;

 private:
  // Returns which of those that may go is missed least. Requires: one may go.
  size_t FindVictim(const std::function<bool(const Checkpoint&)>& may_go) const;

  std::vector<Checkpoint> list_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_CHECKPOINTS_H_
