#include "cache/group_cache.h"

#include <algorithm>

#include "cache/attention_cache.h"
#include "cache/recurrent_cache.h"

namespace gkv {

GroupSet MakeGroups(const std::shared_ptr<const KvLayout>& layout,
                    const std::shared_ptr<BlockPool>& pool) {
  GroupSet groups;
  for (size_t g = 0; g < layout->groups().size(); ++g) {
    if (layout->groups()[g].kind == LayerKind::kRecurrent) {
      groups.push_back(std::make_unique<RecurrentCache>(layout, pool));
    } else {
      groups.push_back(std::make_unique<AttentionCache>(g, layout, pool));
    }
  }
  return groups;
}

GroupSet ShareGroups(const GroupSet& groups, bool forgetting_only) {
  GroupSet shared(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g] || (forgetting_only && !groups[g]->forgets())) continue;
    shared[g] = groups[g]->Share();
  }
  return shared;
}

std::shared_ptr<const GroupSet> CheckpointGroups(const GroupSet& groups,
                                                 size_t position) {
  GroupSet shared = ShareGroups(groups, true);
  for (const auto& group : shared) {
    if (group) group->Rewind(position);
  }
  if (ResumeAt(shared, position) != position) return nullptr;
  const bool again = ResumeAt(shared, position - 1) == position - 1;
  for (const auto& group : shared) {
    if (group) group->Forget(again ? position - 1 : position);
  }
  return std::make_shared<const GroupSet>(std::move(shared));
}

// Groups move together: if one can only begin earlier, the others do so too,
// until all agree.
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

// What the layers of a group need adds up with what the others need, wherever
// these layers lie: docs/cache.md.
size_t ColdStart(const GroupSet& groups, size_t target) {
  for (const auto& group : groups) {
    if (group) target = group->ColdStart(target);
  }
  return target;
}

}  // namespace gkv
