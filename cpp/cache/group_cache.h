#ifndef GEMMAKV_CACHE_GROUP_CACHE_H_
#define GEMMAKV_CACHE_GROUP_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_layout.h"

namespace gkv {

// What a step over positions [begin, end) may read and write of one group: raw
// pointers into its blocks, valid until the step is committed or dropped.
struct GroupStep {
  // Attention groups: the blocks from first_block on, of block_tokens positions
  // each. Recurrent group: one block, the state before `begin`, which the step
  // turns into the state after `end` - 1.
  std::vector<uint8_t*> blocks;
  size_t first_block = 0;
  // Attention: positions below this are not held; no row may read them.
  size_t readable_begin = 0;
  // Attention: the keys and values of positions below this are stored already;
  // the step must not write them (others may share those blocks).
  size_t write_begin = 0;
  // The blocks that the step adds or replaces, by index into `blocks`: they
  // enter the group when the step is committed.
  std::vector<std::pair<size_t, BlockRef>> fresh;
  // Recurrent group: the step ends at `end`, and copies its state to these
  // blocks at their positions, which are ascending, within (begin, end).
  size_t end = 0;
  std::vector<std::pair<size_t, BlockRef>> kept;
};

// A block that a group holds, and its valid part: keys and values of positions
// [begin, end), all of which lie in it, or, if begin == end, the recurrent
// state from before position `end`.
struct HeldBlock {
  size_t begin = 0;
  size_t end = 0;
  BlockRef block;
};

// What the layers of one group hold of one conversation. The kinds of groups
// differ in what they forget, and so in where computing can go on after a
// rewind; all such questions are asked here, never by looking at the kind.
//
// Not thread-safe; Share() and const calls may run at the same time. Blocks to
// which others refer are never written.
class GroupCache {
 public:
  virtual ~GroupCache() = default;

  // Returns an independent group with the same content, which refers to the
  // same blocks.
  virtual std::unique_ptr<GroupCache> Share() const = 0;

  // Whether older positions get lost, so that a rewind may need a checkpoint.
  virtual bool forgets() const = 0;
  // Returns the positions [begin, end) whose keys and values are there and
  // right; empty at `end` for a recurrent group, which holds what position
  // `end` needs.
  virtual std::pair<size_t, size_t> Held() const = 0;

  // Returns the last position <= `limit` at which a step can begin on what is
  // held, so that every row from `target` on is right; nullopt if there is
  // none. An empty group can begin at 0. Requires: limit <= target.
  virtual std::optional<size_t> ResumeAt(size_t limit, size_t target) const = 0;
  // Returns the last position at which a step can begin without anything that
  // the group forgets, so that the output of its layers is right from `target`
  // on.
  virtual size_t ColdStart(size_t target) const = 0;

  // Forgets all positions from `position` on, or everything if nothing before
  // it can be used.
  virtual void Rewind(size_t position) = 0;
  // Forgets everything that a cold start computes anew. Steps go on from
  // `begin`, which is ColdStart(target) or 0, and rows before `target` do not
  // count.
  virtual void Restart(size_t begin, size_t target) = 0;

  // Returns storage for a step over [begin, end): new blocks, and private
  // copies of shared ones that it writes. `before` is a share that nobody
  // writes: if only `before` refers to a block as well, the part of the block
  // after what `before` holds may be written in place. Throws CacheFull.
  // Changes nothing. Requires: begin < end; a step can begin at `begin` on what
  // is held; `keep` is ascending, within (begin, end).
  virtual GroupStep Prepare(size_t begin, size_t end,
                            std::span<const size_t> keep = {},
                            const GroupCache* before = nullptr) const = 0;
  // Takes over what a step computed for [begin, end). Until the next Forget the
  // group can rewind to all positions of `keep` below `end`. Requires: the step
  // is from Prepare of this group or of one that it shares with, with the same
  // begin; `end` is the step's or in its `keep` (recurrent group) or before its
  // end (others).
  virtual void Commit(GroupStep& step, size_t begin, size_t end) = 0;

  // Returns the earliest position at which this group lets a step begin on what
  // is held: the other groups keep what rows from there on see.
  virtual size_t RewindFloor() const = 0;
  // Releases what rows from `floor` on do not see.
  virtual void Forget(size_t floor) = 0;

  // Returns what is held and right of positions up to `position`, ascending.
  virtual std::vector<HeldBlock> Export(size_t position) const = 0;
  // Takes over what Export of such a group returned. Blocks that must not be
  // written are copied before a step writes them. Requires: empty; the
  // positions of keys and values have no gap, and begin at 0 if nothing is ever
  // forgotten.
  virtual void Adopt(std::vector<HeldBlock> held) = 0;

  // Appends every block that the group refers to.
  virtual void AddBlocks(std::vector<const Block*>& out) const = 0;
};

// The groups of one conversation, parallel to KvLayout::groups(). In a
// checkpoint, those that forget nothing are null.
using GroupSet = std::vector<std::unique_ptr<GroupCache>>;

// Returns empty groups for a layout.
GroupSet MakeGroups(const std::shared_ptr<const KvLayout>& layout,
                    const std::shared_ptr<BlockPool>& pool);
// Returns shares of all groups, or only of those that forget.
GroupSet ShareGroups(const GroupSet& groups, bool forgetting_only = false);
// Returns shares of the groups that forget, with what they hold for going on at
// a position within the last step, or also at the one before it if they can,
// and no more. Returns null if they cannot. Requires: they have not forgotten
// since.
std::shared_ptr<const GroupSet> CheckpointGroups(const GroupSet& groups,
                                                 size_t position);
// Returns ResumeAt of all groups together.
std::optional<size_t> ResumeAt(const GroupSet& groups, size_t target);
// Returns ColdStart of all groups together.
size_t ColdStart(const GroupSet& groups, size_t target);

}  // namespace gkv

#endif  // GEMMAKV_CACHE_GROUP_CACHE_H_
