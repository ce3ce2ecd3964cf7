#include "cache/full_cache.h"

#include <algorithm>
#include <utility>

namespace gkv {

FullCache::FullCache(size_t group, std::shared_ptr<const KvLayout> layout,
                     std::shared_ptr<BlockPool> pool)
    : table_(group, std::move(layout), std::move(pool)) {}

std::unique_ptr<GroupCache> FullCache::Share() const {
  return std::make_unique<FullCache>(*this);
}

std::optional<size_t> FullCache::ResumeAt(size_t limit, size_t) const {
  return std::min(limit, end_);
}

size_t FullCache::ColdStart(size_t target) const {
  return std::min(target, end_);
}

void FullCache::Rewind(size_t position) {
  end_ = std::min(end_, position);
  table_.DropFrom(end_);
}

// A cold start reads what full layers hold.
void FullCache::Restart(size_t, size_t) {}

GroupStep FullCache::Prepare(size_t begin, size_t end,
                             std::span<const size_t>) const {
  return table_.Prepare(begin, end, end_);
}

void FullCache::Commit(GroupStep& step, size_t, size_t end) {
  table_.Commit(step, end);
  end_ = std::max(end_, end);
}

void FullCache::Forget(size_t) {}

void FullCache::AddBlocks(std::vector<const Block*>& out) const {
  for (const BlockRef& block : table_.blocks()) out.push_back(block.get());
}

std::vector<HeldBlock> FullCache::Export(size_t position) const {
  return table_.Export(0, std::min(position, end_));
}

void FullCache::Adopt(std::vector<HeldBlock> held) {
  if (!held.empty()) end_ = held.back().end;
  table_.Adopt(std::move(held));
}

}  // namespace gkv
