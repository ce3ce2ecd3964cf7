#ifndef GEMMAKV_CACHE_KV_CONTENT_H_
#define GEMMAKV_CACHE_KV_CONTENT_H_

#include <cstddef>
#include <memory>

#include "base/hash.h"
#include "cache/block_pool.h"
#include "cache/checkpoints.h"
#include "cache/group_cache.h"
#include "cache/kv_layout.h"
#include "cache/token_log.h"

namespace gkv {

// The content of one conversation, as a value: the transcript, the blocks of
// each group, the checkpoints, and the fingerprint of the weights. A copy
// shares pages of token ids and blocks, so copying is O(blocks) and copies no
// key or value. Conversation owns one and guards it by its mutex; Export copies
// it out, Adopt takes one in, and a request keeps a copy to go back to.
// Invariants: computed <= log.size(), and those at the top of kv_cache.cc.
// GroupCache::Export lists the blocks of a group and their valid parts.
struct KvContent {
  // Empty content; steps take their blocks from `pool`.
  KvContent(const std::shared_ptr<const KvLayout>& layout,
            const std::shared_ptr<BlockPool>& pool)
      : log(layout->block_tokens()), groups(MakeGroups(layout, pool)) {}
  KvContent(const KvContent& other)
      : log(other.log),
        computed(other.computed),
        groups(ShareGroups(other.groups)),
        checkpoints(other.checkpoints),
        fingerprint(other.fingerprint) {}
  KvContent(KvContent&&) = default;
  KvContent& operator=(KvContent&&) = default;

  TokenLog log;
  size_t computed = 0;  // positions that have been through the model
  GroupSet groups;
  CheckpointList checkpoints;
  Hash128 fingerprint;  // of the weights; zero before the first step
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_KV_CONTENT_H_
