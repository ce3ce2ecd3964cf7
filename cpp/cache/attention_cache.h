#ifndef GEMMAKV_CACHE_ATTENTION_CACHE_H_
#define GEMMAKV_CACHE_ATTENTION_CACHE_H_

#include "cache/group_cache.h"

namespace gkv {

// The keys and values of full layers, or of sliding layers of one window. Full
// layers keep every position, so rewinding costs nothing, and a replay for the
// sake of other layers reads what is here and never writes it. Sliding layers
// keep the last window of positions, in whole blocks; older blocks are dropped,
// never overwritten.
//
// A cold start of sliding layers computes the window anew from token ids.
// docs/cache.md derives how far back it begins: S layers of window W account
// for S (W - 1) positions. Until the first row that must be right is reached
// the group warms up: it holds what the warm-up needs and nothing else.
//
// Share shares the blocks. A block that is shared or read-only is copied before
// it is written, and only its held part: another conversation's step may be
// writing later positions. The content that a request would go back to does not
// count as sharing: the end that it holds stays as it is when positions after
// that are written.
class AttentionCache final : public GroupCache {
 public:
  AttentionCache(size_t group, std::shared_ptr<const KvLayout> layout,
                 std::shared_ptr<BlockPool> pool);

  std::unique_ptr<GroupCache> Share() const override;
  bool forgets() const override { return group().window != 0; }
  std::pair<size_t, size_t> Held() const override;
  std::optional<size_t> ResumeAt(size_t limit, size_t target) const override;
  size_t ColdStart(size_t target) const override;
  void Rewind(size_t position) override;
  void Restart(size_t begin, size_t target) override;
  GroupStep Prepare(size_t begin, size_t end,
                    std::span<const size_t> keep,
                    const GroupCache* before) const override;
  void Commit(GroupStep& step, size_t begin, size_t end) override;
  // The last position: its window is kept, so that a finished prompt can give
  // logits once more.
  size_t RewindFloor() const override { return end_ > 0 ? end_ - 1 : 0; }
  void Forget(size_t floor) override;
  std::vector<HeldBlock> Export(size_t position) const override;
  void Adopt(std::vector<HeldBlock> held) override;
  void AddBlocks(std::vector<const Block*>& out) const override;

 private:
  const KvGroup& group() const { return layout_->groups()[group_]; }
  size_t WindowBegin(size_t position) const;
  BlockRef CopyBlock(const BlockRef& from, size_t tokens) const;
  bool MayExtend(const BlockRef& block, const GroupCache* before) const;
  void Clear();

  size_t group_;
  std::shared_ptr<const KvLayout> layout_;
  std::shared_ptr<BlockPool> pool_;
  // The blocks cover [begin_, end_), from position first_block_ * block_tokens
  // on.
  std::vector<BlockRef> blocks_;
  size_t first_block_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  // While warming up, rows from here on are right: begin_ <= end_ <
  // warm_target_.
  size_t warm_target_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_ATTENTION_CACHE_H_
