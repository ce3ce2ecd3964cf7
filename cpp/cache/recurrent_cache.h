#ifndef GEMMAKV_CACHE_RECURRENT_CACHE_H_
#define GEMMAKV_CACHE_RECURRENT_CACHE_H_

#include "cache/group_cache.h"

namespace gkv {

// The states of recurrent layers: one state of fixed size stands for everything
// before a position (layout: KvLayerSpec). It is zero at position 0.
//
// A state block is written by the step that makes it and never again: a step
// turns a copy of the state into the next one, and copies it at the positions
// where it is asked to. So a reference to a block is a snapshot. The state
// before the last one is kept too: computing can go back to the beginning of
// the last step, or to the last position within it that was kept. Anything
// further back needs a checkpoint or starts at 0.
class RecurrentCache final : public GroupCache {
 public:
  RecurrentCache(std::shared_ptr<const KvLayout> layout,
                 std::shared_ptr<BlockPool> pool);

  std::unique_ptr<GroupCache> Share() const override;
  bool forgets() const override { return true; }
  std::pair<size_t, size_t> Held() const override;
  std::optional<size_t> ResumeAt(size_t limit, size_t target) const override;
  size_t ColdStart(size_t) const override { return 0; }
  void Rewind(size_t position) override;
  void Restart(size_t begin, size_t target) override;
  GroupStep Prepare(size_t begin, size_t end,
                    std::span<const size_t> keep,
                    const GroupCache* before) const override;
  void Commit(GroupStep& step, size_t begin, size_t end) override;
  size_t RewindFloor() const override;
  void Forget(size_t floor) override;
  std::vector<HeldBlock> Export(size_t position) const override;
  void Adopt(std::vector<HeldBlock> held) override;
  void AddBlocks(std::vector<const Block*>& out) const override;

 private:
  // The state after positions [0, position).
  struct Snapshot {
    size_t position;
    BlockRef state;
  };

  std::shared_ptr<const KvLayout> layout_;
  std::shared_ptr<BlockPool> pool_;
  // Ascending. After Forget(RewindFloor()): the last state and the one before
  // it.
  std::vector<Snapshot> states_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_RECURRENT_CACHE_H_
