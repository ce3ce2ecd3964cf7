#include "cache/recurrent_cache.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace gkv {

RecurrentCache::RecurrentCache(std::shared_ptr<const KvLayout> layout,
                               std::shared_ptr<BlockPool> pool)
    : layout_(std::move(layout)), pool_(std::move(pool)) {}

std::unique_ptr<GroupCache> RecurrentCache::Share() const {
  return std::make_unique<RecurrentCache>(*this);
}

std::pair<size_t, size_t> RecurrentCache::Held() const {
  const size_t position = states_.empty() ? 0 : states_.back().position;
  return {position, position};
}

std::optional<size_t> RecurrentCache::ResumeAt(size_t limit, size_t) const {
  for (auto state = states_.rbegin(); state != states_.rend(); ++state) {
    if (state->position <= limit) return state->position;
  }
  // Only an empty group begins with the zero state. Otherwise position 0 is a
  // cold start, which clears the other groups too.
  if (!states_.empty()) return std::nullopt;
  return 0;
}

void RecurrentCache::Rewind(size_t position) {
  while (!states_.empty() && states_.back().position > position) {
    states_.pop_back();
  }
}

void RecurrentCache::Restart(size_t begin, size_t) {
  assert(begin == 0);
  (void)begin;
  states_.clear();
}

GroupStep RecurrentCache::Prepare(size_t begin, size_t end,
                                  std::span<const size_t> keep,
                                  const GroupCache*) const {
  const size_t bytes = layout_->state_bytes();
  const auto before =
      std::find_if(states_.begin(), states_.end(),
                   [&](const Snapshot& s) { return s.position == begin; });
  GroupStep step;
  step.readable_begin = step.write_begin = begin;
  step.end = end;
  BlockRef state = pool_->Acquire(bytes);
  if (before != states_.end()) {
    std::memcpy(state.data(), before->state.data(), bytes);
  } else {
    assert(begin == 0 && states_.empty());
    std::memset(state.data(), 0, bytes);
  }
  step.blocks.push_back(state.data());
  step.fresh.emplace_back(0, std::move(state));
  for (const size_t position : keep) {
    step.kept.emplace_back(position, pool_->Acquire(bytes));
  }
  return step;
}

void RecurrentCache::Commit(GroupStep& step, size_t begin, size_t end) {
  // A step that went back to the beginning of the last step replaces it.
  Rewind(begin);
  if (states_.size() > 1) states_.erase(states_.begin(), states_.end() - 1);
  for (auto& [position, state] : step.kept) {
    if (position <= end) states_.push_back({position, std::move(state)});
  }
  if (end == step.end) {
    states_.push_back({end, std::move(step.fresh[0].second)});
  }
  assert(states_.back().position == end);
  step.kept.clear();
  step.fresh.clear();
}

size_t RecurrentCache::RewindFloor() const {
  return states_.size() > 1 ? states_[states_.size() - 2].position
                            : Held().second;
}

void RecurrentCache::Forget(size_t floor) {
  std::erase_if(states_, [&](const Snapshot& s) { return s.position < floor; });
}

void RecurrentCache::AddBlocks(std::vector<const Block*>& out) const {
  for (const Snapshot& snapshot : states_) out.push_back(snapshot.state.get());
}

std::vector<HeldBlock> RecurrentCache::Export(size_t position) const {
  std::vector<HeldBlock> held;
  for (const Snapshot& snapshot : states_) {
    if (snapshot.position > position) break;
    held.push_back({snapshot.position, snapshot.position, snapshot.state});
  }
  return held;
}

void RecurrentCache::Adopt(std::vector<HeldBlock> held) {
  for (HeldBlock& state : held) {
    states_.push_back({state.end, std::move(state.block)});
  }
}

}  // namespace gkv
