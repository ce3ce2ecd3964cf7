#include "cache/attention_cache.h"

#include <algorithm>
#include <utility>

namespace gkv {

AttentionCache::AttentionCache(size_t group,
                               std::shared_ptr<const KvLayout> layout,
                               std::shared_ptr<BlockPool> pool)
    : table_(group, std::move(layout), std::move(pool)) {}

std::unique_ptr<GroupCache> AttentionCache::Share() const {
  return std::make_unique<AttentionCache>(*this);
}

std::pair<size_t, size_t> AttentionCache::Held() const {
  if (warm_target_ != 0) return {0, 0};
  return {begin_, end_};
}

// First position that a row sees.
size_t AttentionCache::WindowBegin(size_t position) const {
  const size_t window = table_.group().window;
  return window != 0 && position >= window ? position + 1 - window : 0;
}

void AttentionCache::Clear() {
  table_.DropFrom(0);
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
  const KvGroup& group = table_.group();
  if (!forgets()) return std::min(target, end_);
  const size_t warm_up = group.layers.size() * (group.window - 1);
  return target > warm_up ? target - warm_up : 0;
}

void AttentionCache::Rewind(size_t position) {
  if (end_ <= position) return;
  // What is right in the middle of a warm-up depends on its target.
  if (warm_target_ != 0 || begin_ >= position) return Clear();
  end_ = position;
  table_.DropFrom(end_);
}

void AttentionCache::Restart(size_t begin, size_t target) {
  if (!forgets()) return;
  Clear();
  begin_ = end_ = begin;
  if (begin > 0 && begin < target) warm_target_ = target;
}

GroupStep AttentionCache::Prepare(size_t begin, size_t end,
                                  std::span<const size_t>) const {
  GroupStep step = table_.Prepare(begin, end, end_);
  step.readable_begin = begin_;
  return step;
}

void AttentionCache::Commit(GroupStep& step, size_t, size_t end) {
  table_.Commit(step, end);
  end_ = std::max(end_, end);
  if (warm_target_ == 0 || end_ < warm_target_) return;
  // Deeper layers are right only from the target's window on.
  begin_ = std::max(begin_, WindowBegin(warm_target_));
  warm_target_ = 0;
}

void AttentionCache::Forget(size_t floor) {
  if (table_.empty()) return;
  // The last position stays, whatever the window: empty means position 0.
  table_.DropBefore(WindowBegin(std::min(floor, RewindFloor())));
  begin_ =
      std::max(begin_, table_.first_block() * table_.layout().block_tokens());
}

void AttentionCache::AddBlocks(std::vector<const Block*>& out) const {
  for (const BlockRef& block : table_.blocks()) out.push_back(block.get());
}

std::vector<HeldBlock> AttentionCache::Export(size_t position) const {
  const auto [begin, end] = Held();
  return table_.Export(begin, std::min(position, end));
}

void AttentionCache::Adopt(std::vector<HeldBlock> held) {
  if (!held.empty()) {
    begin_ = held.front().begin;
    end_ = held.back().end;
  }
  table_.Adopt(std::move(held));
}

}  // namespace gkv
