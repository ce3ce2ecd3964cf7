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

// What one conversation holds, as a value: pages of token ids and blocks are
// shared by copies, so copying is O(blocks) and copies no key or value.
// GroupCache::Export tells the blocks of each group and what of them counts.
struct KvContent {
  // Of nothing; steps take their blocks from `pool`.
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
