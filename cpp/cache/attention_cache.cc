#include "cache/attention_cache.h"

#include <algorithm>
#include <utility>

#include "base/rounding.h"
#include "cache/kv_copy.h"

namespace gkv {

AttentionCache::AttentionCache(size_t group,
                               std::shared_ptr<const KvLayout> layout,
                               std::shared_ptr<BlockPool> pool)
    : group_(group), layout_(std::move(layout)), pool_(std::move(pool)) {}

std::unique_ptr<GroupCache> AttentionCache::Share() const {
  return std::make_unique<AttentionCache>(*this);
}

std::pair<size_t, size_t> AttentionCache::Held() const {
  if (warm_target_ != 0) return {0, 0};
  return {begin_, end_};
}

// Returns the first position that a row sees.
size_t AttentionCache::WindowBegin(size_t position) const {
  const size_t window = group().window;
  return window != 0 && position >= window ? position + 1 - window : 0;
}

void AttentionCache::Clear() {
  blocks_.clear();
  begin_ = end_ = warm_target_ = 0;
}

std::optional<size_t> AttentionCache::ResumeAt(size_t limit,
                                               size_t target) const {
  if (warm_target_ != 0) {
    if (warm_target_ > target || end_ > limit) return std::nullopt;
    return end_;
  }
  const size_t position = std::min(limit, end_);
  if (begin_ > WindowBegin(position)) return std::nullopt;
  return position;
}

size_t AttentionCache::ColdStart(size_t target) const {
  if (!forgets()) return std::min(target, end_);
  const size_t warm_up = group().layers.size() * (group().window - 1);
  return target > warm_up ? target - warm_up : 0;
}

void AttentionCache::Rewind(size_t position) {
  if (end_ <= position) return;
  // In the middle of a warm-up, what is right depends on the target.
  if (warm_target_ != 0 || begin_ >= position) return Clear();
  end_ = position;
  const size_t last = CeilDiv(end_, layout_->block_tokens());
  const size_t keep = last > first_block_ ? last - first_block_ : 0;
  if (keep < blocks_.size()) blocks_.resize(keep);
}

void AttentionCache::Restart(size_t begin, size_t target) {
  if (!forgets()) return;
  Clear();
  begin_ = end_ = begin;
  if (begin > 0 && begin < target) warm_target_ = target;
}

BlockRef AttentionCache::CopyBlock(const BlockRef& from, size_t tokens) const {
  BlockRef to = pool_->Acquire(group().block_bytes);
  // The positions of the block do not matter.
  const HeldBlock held = {0, tokens, from};
  CopyPositions(*layout_, {&held, 1}, *layout_, group_, 0, tokens, to.data());
  return to;
}

// Whether positions from end_ on may be written in place.
bool AttentionCache::MayExtend(const BlockRef& block,
                               const GroupCache* before) const {
  if (block.writable() || before == nullptr) return block.writable();
  const auto& past = static_cast<const AttentionCache&>(*before);
  return past.end_ <= end_ && block.writable(2) &&
         std::any_of(past.blocks_.begin(), past.blocks_.end(),
                     [&](const BlockRef& b) { return b.get() == block.get(); });
}

GroupStep AttentionCache::Prepare(size_t begin, size_t end,
                                  std::span<const size_t>,
                                  const GroupCache* before) const {
  const size_t block_tokens = layout_->block_tokens();
  GroupStep step;
  step.write_begin = end_;
  step.readable_begin = begin_;
  step.first_block = blocks_.empty() ? begin / block_tokens : first_block_;
  step.blocks.reserve(blocks_.size() + 1);
  for (const BlockRef& block : blocks_) step.blocks.push_back(block.data());
  const size_t written = std::max(begin, end_);
  if (written >= end) return step;
  const size_t last = (end - 1) / block_tokens;
  for (size_t block = written / block_tokens; block <= last; ++block) {
    const size_t index = block - step.first_block;
    if (index < blocks_.size()) {
      if (MayExtend(blocks_[index], before)) continue;
      const size_t first = block * block_tokens;
      const size_t held = end_ > first ? end_ - first : 0;
      step.fresh.emplace_back(index, CopyBlock(blocks_[index], held));
      step.blocks[index] = step.fresh.back().second.data();
    } else {
      step.fresh.emplace_back(index, pool_->Acquire(group().block_bytes));
      step.blocks.push_back(step.fresh.back().second.data());
    }
  }
  return step;
}

void AttentionCache::Commit(GroupStep& step, size_t, size_t end) {
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
  end_ = std::max(end_, end);
  if (warm_target_ == 0 || end_ < warm_target_) return;
  // Deeper layers are right only from the target's window on.
  begin_ = std::max(begin_, WindowBegin(warm_target_));
  warm_target_ = 0;
}

void AttentionCache::Forget(size_t floor) {
  if (blocks_.empty()) return;
  // The last position stays, whatever the window: an empty group is at position
  // 0.
  const size_t first = WindowBegin(std::min(floor, RewindFloor())) /
                       layout_->block_tokens();
  if (first > first_block_) {
    const size_t drop = std::min(first - first_block_, blocks_.size());
    blocks_.erase(blocks_.begin(),
                  blocks_.begin() + static_cast<ptrdiff_t>(drop));
    first_block_ += drop;
  }
  begin_ = std::max(begin_, first_block_ * layout_->block_tokens());
}

void AttentionCache::AddBlocks(std::vector<const Block*>& out) const {
  for (const BlockRef& block : blocks_) out.push_back(block.get());
}

std::vector<HeldBlock> AttentionCache::Export(size_t position) const {
  const auto [begin, end] = Held();
  std::vector<HeldBlock> held;
  const auto add = [&](size_t block, size_t from, size_t to) {
    held.push_back({from, to, blocks_[block - first_block_]});
  };
  layout_->ForBlocks(begin, std::min(position, end), add);
  return held;
}

void AttentionCache::Adopt(std::vector<HeldBlock> held) {
  if (held.empty()) return;
  begin_ = held.front().begin;
  end_ = held.back().end;
  first_block_ = begin_ / layout_->block_tokens();
  for (HeldBlock& part : held) blocks_.push_back(std::move(part.block));
}

}  // namespace gkv
