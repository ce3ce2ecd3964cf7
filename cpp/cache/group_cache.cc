#include "cache/group_cache.h"

#include <algorithm>

#include "cache/full_cache.h"
#include "cache/recurrent_cache.h"
#include "cache/sliding_cache.h"

namespace gkv {

GroupSet MakeGroups(const std::shared_ptr<const KvLayout>& layout,
                    const std::shared_ptr<BlockPool>& pool) {
  GroupSet groups;
  const auto make = [&]<typename Cache>(GroupId id) {
    if (!layout->has_group(id)) return;
    groups[static_cast<size_t>(id)] = std::make_unique<Cache>(layout, pool);
  };
  make.operator()<FullCache>(GroupId::kFull);
  make.operator()<SlidingCache>(GroupId::kSliding);
  make.operator()<RecurrentCache>(GroupId::kRecurrent);
  return groups;
}

GroupSet ShareGroups(const GroupSet& groups, bool forgetting_only) {
  GroupSet shared;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g] || (forgetting_only && !groups[g]->forgets())) continue;
    shared[g] = groups[g]->Share();
  }
  return shared;
}

// Groups move together: one that can only begin earlier takes the others with
// it, until all agree.
std::optional<size_t> ResumeAt(const GroupSet& groups, size_t target) {
  size_t position = target;
  while (true) {
    const size_t before = position;
    for (const auto& group : groups) {
      if (!group) continue;
      const std::optional<size_t> at = group->ResumeAt(position, target);
      if (!at) return std::nullopt;
      position = *at;
    }
    if (position == before) return position;
  }
}

size_t ColdStart(const GroupSet& groups, size_t target) {
  size_t position = target;
  for (const auto& group : groups) {
    if (group) position = std::min(position, group->ColdStart(target));
  }
  return position;
}

const BlockTable& AttentionTable(const GroupSet& groups, GroupId id) {
  const GroupCache& group = *groups[static_cast<size_t>(id)];
  return id == GroupId::kFull ? static_cast<const FullCache&>(group).table()
                              : static_cast<const SlidingCache&>(group).table();
}

const RecurrentCache& RecurrentGroup(const GroupSet& groups) {
  return static_cast<const RecurrentCache&>(
      *groups[static_cast<size_t>(GroupId::kRecurrent)]);
}

}  // namespace gkv
