#ifndef GEMMAKV_CACHE_BLOCK_TABLE_H_
#define GEMMAKV_CACHE_BLOCK_TABLE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "cache/block_pool.h"
#include "cache/group_cache.h"
#include "cache/kv_layout.h"

namespace gkv {

// The blocks of an attention group that hold a run of positions. Copying
// shares the blocks. One that is shared or read-only is copied before it is
// written, the held part of it only: later positions may be under way in
// another conversation's step.
class BlockTable {
 public:
  BlockTable(size_t group, std::shared_ptr<const KvLayout> layout,
             std::shared_ptr<BlockPool> pool);

  bool empty() const { return blocks_.empty(); }
  // Index of the first block; positions from first_block() * block_tokens.
  size_t first_block() const { return first_block_; }
  const std::vector<BlockRef>& blocks() const { return blocks_; }
  const KvLayout& layout() const { return *layout_; }
  const KvGroup& group() const { return layout_->groups()[group_]; }

  // Pointers to all blocks, those that positions [write_begin, end) lie in
  // being private. Sets blocks, first_block, write_begin and fresh of the
  // result. Throws OutOfBlocks. Requires: positions below write_begin, and
  // none above, are held in the blocks of the table.
  GroupStep Prepare(size_t begin, size_t end, size_t write_begin) const;
  // Takes over what the step made of positions below `end`.
  void Commit(GroupStep& step, size_t end);

  // Drops blocks that hold only positions >= `end`, or only ones < `begin`.
  void DropFrom(size_t end);
  void DropBefore(size_t begin);
  // The blocks of positions [begin, end), and the other way round. Requires:
  // they are held; empty().
  std::vector<HeldBlock> Export(size_t begin, size_t end) const;
  void Adopt(std::vector<HeldBlock> held);

 private:
  BlockRef CopyBlock(const BlockRef& from, size_t tokens) const;

  size_t group_;
  std::shared_ptr<const KvLayout> layout_;
  std::shared_ptr<BlockPool> pool_;
  size_t first_block_ = 0;
  std::vector<BlockRef> blocks_;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_TABLE_H_
