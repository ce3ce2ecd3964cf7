#include "cache/block_table.h"

#include <algorithm>
#include <utility>

#include "ops/kv_strip.h"

namespace gkv {

BlockTable::BlockTable(size_t group, std::shared_ptr<const KvLayout> layout,
                       std::shared_ptr<BlockPool> pool)
    : group_(group), layout_(std::move(layout)), pool_(std::move(pool)) {}

BlockRef BlockTable::CopyBlock(const BlockRef& from, size_t tokens) const {
  BlockRef copy = pool_->Acquire(group().block_bytes);
  const size_t block_tokens = layout_->block_tokens();
  for (const size_t layer : group().layers) {
    const KvLayerSpec& spec = layout_->layers()[layer];
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      const size_t keys = layout_->key_offset(layer, head);
      const size_t values = layout_->value_offset(layer, head);
      CopyKeys(layout_->dtype(), from.data() + keys, block_tokens,
               spec.head_dim, tokens, copy.data() + keys, block_tokens);
      CopyValues(layout_->dtype(), from.data() + values, block_tokens,
                 spec.head_dim, tokens, copy.data() + values, block_tokens);
    }
  }
  return copy;
}

GroupStep BlockTable::Prepare(size_t begin, size_t end,
                              size_t write_begin) const {
  const size_t block_tokens = layout_->block_tokens();
  GroupStep step;
  step.write_begin = write_begin;
  step.first_block = blocks_.empty() ? begin / block_tokens : first_block_;
  step.blocks.reserve(blocks_.size() + 1);
  for (const BlockRef& block : blocks_) step.blocks.push_back(block.data());
  const size_t written = std::max(begin, write_begin);
  if (written >= end) return step;
  const size_t last = (end - 1) / block_tokens;
  for (size_t block = written / block_tokens; block <= last; ++block) {
    const size_t index = block - step.first_block;
    if (index < blocks_.size()) {
      if (blocks_[index].writable()) continue;
      const size_t first = block * block_tokens;
      const size_t held = write_begin > first ? write_begin - first : 0;
      step.fresh.emplace_back(index, CopyBlock(blocks_[index], held));
      step.blocks[index] = step.fresh.back().second.data();
    } else {
      step.fresh.emplace_back(index,
                              pool_->Acquire(group().block_bytes));
      step.blocks.push_back(step.fresh.back().second.data());
    }
  }
  return step;
}

void BlockTable::Commit(GroupStep& step, size_t end) {
  if (blocks_.empty()) first_block_ = step.first_block;
  for (auto& [index, block] : step.fresh) {
    if ((first_block_ + index) * layout_->block_tokens() >= end) break;
    if (index < blocks_.size()) {
      blocks_[index] = std::move(block);
    } else {
      blocks_.push_back(std::move(block));
    }
  }
  step.fresh.clear();
}

void BlockTable::DropFrom(size_t end) {
  const size_t block_tokens = layout_->block_tokens();
  const size_t last = (end + block_tokens - 1) / block_tokens;
  const size_t keep = last > first_block_ ? last - first_block_ : 0;
  if (keep < blocks_.size()) blocks_.resize(keep);
}

void BlockTable::DropBefore(size_t begin) {
  const size_t first = begin / layout_->block_tokens();
  if (first <= first_block_) return;
  const size_t drop = std::min(first - first_block_, blocks_.size());
  blocks_.erase(blocks_.begin(),
                blocks_.begin() + static_cast<ptrdiff_t>(drop));
  first_block_ += drop;
}

std::vector<HeldBlock> BlockTable::Export(size_t begin, size_t end) const {
  const size_t block_tokens = layout_->block_tokens();
  std::vector<HeldBlock> held;
  while (begin < end) {
    const size_t block = begin / block_tokens;
    const size_t last = std::min(end, (block + 1) * block_tokens);
    held.push_back({begin, last, blocks_[block - first_block_]});
    begin = last;
  }
  return held;
}

void BlockTable::Adopt(std::vector<HeldBlock> held) {
  if (held.empty()) return;
  first_block_ = held.front().begin / layout_->block_tokens();
  for (HeldBlock& part : held) blocks_.push_back(std::move(part.block));
}

}  // namespace gkv
