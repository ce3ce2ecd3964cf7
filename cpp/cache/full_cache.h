#ifndef GEMMAKV_CACHE_FULL_CACHE_H_
#define GEMMAKV_CACHE_FULL_CACHE_H_

#include "cache/block_table.h"
#include "cache/group_cache.h"

namespace gkv {

// Full-attention layers: every position from 0 on is kept. Rewinding costs
// nothing, and a replay for the sake of other layers reads what is here and
// never writes it.
class FullCache final : public GroupCache {
 public:
  FullCache(size_t group, std::shared_ptr<const KvLayout> layout,
            std::shared_ptr<BlockPool> pool);

  std::unique_ptr<GroupCache> Share() const override;
  bool forgets() const override { return false; }
  std::pair<size_t, size_t> Held() const override { return {0, end_}; }
  std::optional<size_t> ResumeAt(size_t limit, size_t target) const override;
  size_t ColdStart(size_t target) const override;
  void Rewind(size_t position) override;
  void Restart(size_t begin, size_t target) override;
  GroupStep Prepare(size_t begin, size_t end,
                    std::span<const size_t> keep) const override;
  void Commit(GroupStep& step, size_t begin, size_t end) override;
  size_t RewindFloor() const override { return end_; }
  void Forget(size_t floor) override;
  std::vector<HeldBlock> Export(size_t position) const override;
  void Adopt(std::vector<HeldBlock> held) override;
  void AddBlocks(std::vector<const Block*>& out) const override;

 private:
  BlockTable table_;  // covers exactly [0, end_)
  size_t end_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_FULL_CACHE_H_
