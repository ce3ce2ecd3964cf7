#include "cache/checkpoints.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

namespace gkv {

namespace {

std::vector<const Block*> BlocksOf(std::span<const Checkpoint> checkpoints) {
  std::vector<const Block*> blocks;
  for (const Checkpoint& checkpoint : checkpoints) {
    for (const auto& group : *checkpoint.groups) {
      if (group) group->AddBlocks(blocks);
    }
  }
  return blocks;
}

// Returns the bytes of all blocks that they refer to, each counted once.
size_t DistinctBytes(std::span<const Checkpoint> checkpoints) {
  std::vector<const Block*> blocks = BlocksOf(checkpoints);
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  size_t bytes = 0;
  for (const Block* block : blocks) bytes += block->size_bytes;
  return bytes;
}

}  // namespace

bool CheckpointList::Add(Checkpoint checkpoint, size_t budget_bytes) {
  const size_t bytes = DistinctBytes({&checkpoint, 1});
  if (bytes == 0 || bytes > budget_bytes) return bytes == 0;
  const size_t position = checkpoint.position;
  const auto at = std::lower_bound(
      list_.begin(), list_.end(), position,
      [](const Checkpoint& c, size_t p) { return c.position < p; });
  if (at != list_.begin()) {
    checkpoint.length = std::max(checkpoint.length, (at - 1)->length);
  }
  if (at != list_.end() && at->position == position) {
    *at = std::move(checkpoint);
  } else {
    list_.insert(at, std::move(checkpoint));
  }
  while (nbytes() > budget_bytes) {
    const size_t victim = FindVictim([](const Checkpoint&) { return true; });
    list_.erase(list_.begin() + static_cast<ptrdiff_t>(victim));
  }
  const Checkpoint* stays = AtOrBefore(position);
  return stays != nullptr && stays->position == position;
}

std::vector<Checkpoint> CheckpointList::GiveUp(const BlockOwner* owner,
                                               size_t bytes, size_t& freed) {
  const auto ours_alone = [](const Checkpoint& checkpoint) {
    return checkpoint.groups.use_count() == 1;
  };
  std::map<const Block*, uint32_t> references;
  for (const Checkpoint& checkpoint : list_) {
    if (!ours_alone(checkpoint)) continue;
    for (const Block* block : BlocksOf({&checkpoint, 1})) ++references[block];
  }
  std::erase_if(references, [&](const auto& entry) {
    const auto& [block, count] = entry;
    // Prefix indexes give up their references to the block next.
    return block->owner.get() != owner ||
           block->refs.load() - block->indexed.load() != count;
  });
  std::vector<Checkpoint> given_up;
  given_up.reserve(list_.size());
  freed = 0;
  while (freed < bytes && !references.empty()) {
    const size_t victim = FindVictim([&](const Checkpoint& checkpoint) {
      const std::vector<const Block*> blocks = BlocksOf({&checkpoint, 1});
      return ours_alone(checkpoint) &&
             std::any_of(blocks.begin(), blocks.end(), [&](const Block* block) {
               return references.contains(block);
             });
    });
    for (const Block* block : BlocksOf({&list_[victim], 1})) {
      const auto found = references.find(block);
      if (found == references.end() || --found->second > 0) continue;
      freed += block->size_bytes;
      references.erase(found);
    }
    given_up.push_back(std::move(list_[victim]));
    list_.erase(list_.begin() + static_cast<ptrdiff_t>(victim));
  }
  return given_up;
}

size_t CheckpointList::FindVictim(
    const std::function<bool(const Checkpoint&)>& may_go) const {
  const size_t last = list_.size() - 1;
  size_t victim = list_.size();
  double smallest = 0;
  for (size_t i = 1; i < last; ++i) {
    if (!may_go(list_[i])) continue;
    const size_t gap = list_[i + 1].position - list_[i - 1].position;
    const size_t age = list_[last].position - list_[i].position;
    const double relative = static_cast<double>(gap) / static_cast<double>(age);
    if (victim == list_.size() || relative < smallest) {
      victim = i;
      smallest = relative;
    }
  }
  if (victim < list_.size()) return victim;
  return may_go(list_[0]) ? 0 : last;
}

const Checkpoint* CheckpointList::AtOrBefore(size_t position) const {
  const auto behind =
      std::find_if(list_.begin(), list_.end(),
                   [&](const Checkpoint& c) { return c.position > position; });
  return behind == list_.begin() ? nullptr : &*(behind - 1);
}

const Checkpoint* CheckpointList::OfLength(size_t length) const {
  const auto found =
      std::find_if(list_.rbegin(), list_.rend(),
                   [&](const Checkpoint& c) { return c.length == length; });
  return found == list_.rend() ? nullptr : &*found;
}

void CheckpointList::Truncate(size_t length) {
  std::erase_if(list_,
                [&](const Checkpoint& c) { return c.position > length; });
  // If pending tokens were cut, what is held is as right as before. Lengths
  // stay ascending.
  for (size_t i = list_.size(); i > 0; --i) {
    Checkpoint& checkpoint = list_[i - 1];
    if (checkpoint.length > length) checkpoint.length = checkpoint.position;
    length = checkpoint.length;
  }
}

size_t CheckpointList::nbytes() const { return DistinctBytes(list_); }

}  // namespace gkv
