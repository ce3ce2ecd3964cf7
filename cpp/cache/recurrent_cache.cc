#include "cache/recurrent_cache.h"

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
  return {current_.position, current_.position};
}

std::optional<size_t> RecurrentCache::ResumeAt(size_t limit, size_t) const {
  for (const Snapshot* snapshot : {&current_, &previous_}) {
    if (snapshot->state && snapshot->position <= limit) {
      return snapshot->position;
    }
  }
  // Only an empty group begins with the zero state: otherwise position 0 is a
  // cold start, which clears the other groups too.
  if (current_.state) return std::nullopt;
  return 0;
}

void RecurrentCache::Rewind(size_t position) {
  if (current_.position > position) {
    current_ = std::exchange(previous_, {});
  }
  if (current_.position > position || position == 0) current_ = previous_ = {};
}

void RecurrentCache::Restart(size_t begin, size_t) {
  assert(begin == 0);
  (void)begin;
  current_ = previous_ = {};
}

GroupStep RecurrentCache::Prepare(size_t begin, size_t) const {
  const size_t bytes = layout_->state_bytes();
  GroupStep step;
  step.readable_begin = step.write_begin = begin;
  BlockRef state = pool_->Acquire(bytes);
  if (current_.state && current_.position == begin) {
    std::memcpy(state.data(), current_.state.data(), bytes);
  } else if (previous_.state && previous_.position == begin) {
    std::memcpy(state.data(), previous_.state.data(), bytes);
  } else {
    assert(begin == 0 && !current_.state);
    std::memset(state.data(), 0, bytes);
  }
  step.blocks.push_back(state.data());
  step.fresh.emplace_back(0, std::move(state));
  return step;
}

void RecurrentCache::Commit(GroupStep& step, size_t begin, size_t end) {
  // A step that went back to the beginning of the last one takes its place.
  if (current_.position == begin) previous_ = std::move(current_);
  current_ = {end, std::move(step.fresh[0].second)};
  step.fresh.clear();
}

size_t RecurrentCache::RewindFloor() const {
  return previous_.state ? previous_.position : current_.position;
}

void RecurrentCache::AddBlocks(std::vector<const Block*>& out) const {
  for (const Snapshot* snapshot : {&current_, &previous_}) {
    if (snapshot->state) out.push_back(snapshot->state.get());
  }
}

void RecurrentCache::Restore(Snapshot current, Snapshot previous) {
  current_ = std::move(current);
  previous_ = std::move(previous);
}

}  // namespace gkv
