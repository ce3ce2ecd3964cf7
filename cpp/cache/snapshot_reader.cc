#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/snapshot.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

using Range = SnapshotHeader::Range;
using Mark = SnapshotHeader::Mark;

std::span<const uint8_t> ReadSealed(ByteReader& reader, uint64_t size,
                                    const char* what) {
  const std::span<const uint8_t> bytes = reader.ReadBytes(size, what);
  if (reader.Read<Hash128>(what) != HashBytes(bytes)) {
    ThrowCorruptSnapshot(StrCat("the ", what, " do not match their checksum"));
  }
  return bytes;
}

std::vector<int32_t> DecodeTokens(std::span<const uint8_t> bytes) {
  std::vector<int32_t> tokens(bytes.size() / sizeof(int32_t));
  if (!tokens.empty()) std::memcpy(tokens.data(), bytes.data(), bytes.size());
  for (const int32_t token : tokens) {
    if (token < 0) {
      ThrowCorruptSnapshot(StrCat("token id ", token, " is negative"));
    }
  }
  return tokens;
}

// New blocks with the content of a snapshot's payload.
class Storage {
 public:
  Storage(const std::shared_ptr<const KvLayout>& layout,
          const std::shared_ptr<BlockPool>& pool, const SnapshotHeader& header,
          const uint8_t* payload)
      : layout_(layout), header_(header), blocks_(layout->groups().size()) {
    const size_t block_tokens = layout_->block_tokens();
    for (size_t g = 0; g < blocks_.size(); ++g) {
      const KvGroup& group = layout_->groups()[g];
      for (const Range& range : header.ranges(group)) {
        const size_t end = (range.end - 1) / block_tokens + 1;
        blocks_[g].resize(std::max(blocks_[g].size(), end));
        for (size_t i = range.begin / block_tokens; i < end; ++i) {
          // Two ranges may lie in one block.
          if (!blocks_[g][i]) blocks_[g][i] = pool->Acquire(group.block_bytes);
        }
      }
    }
    ForStrips(*layout_, header,
              [&](size_t layer, size_t head, const Range& range) {
                const size_t bytes =
                    KvStripBytes(layout_->dtype(), range.tokens(),
                                 layout_->layers()[layer].head_dim);
                CopyStrips(layer, head, range, payload, payload + bytes);
                payload += 2 * bytes;
              });
    for (size_t i = 0; i < header.states.size(); ++i) {
      states_.push_back(pool->Acquire(layout_->state_bytes()));
      for (size_t layer = 0; layer < layout_->layers().size(); ++layer) {
        if (layout_->layers()[layer].kind != LayerKind::kRecurrent) continue;
        const size_t bytes = layout_->state_floats(layer) * sizeof(float);
        std::memcpy(states_[i].data() + layout_->state_offset(layer), payload,
                    bytes);
        payload += bytes;
      }
    }
  }

  // Puts what a mark refers to, and the full layers' part, into empty groups.
  void Restore(const Mark& mark, GroupSet& groups) const {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (groups[g]) groups[g]->Adopt(Held(g, mark));
    }
  }

 private:
  std::vector<HeldBlock> Held(size_t g, const Mark& mark) const {
    const KvGroup& group = layout_->groups()[g];
    std::vector<HeldBlock> held;
    if (group.kind == LayerKind::kRecurrent) {
      for (size_t i = 0; i < states_.size(); ++i) {
        const uint64_t at = header_.states[i];
        if (at != mark.position && at != mark.previous) continue;
        held.push_back({at, at, states_[i]});
      }
      return held;
    }
    const bool slides = group.kind == LayerKind::kSliding;
    const uint64_t end = slides ? mark.position : header_.computed;
    uint64_t begin = slides ? mark.sliding_begin.at(group.window) : 0;
    while (begin < end) {
      const size_t block = begin / layout_->block_tokens();
      const uint64_t last =
          std::min<uint64_t>(end, (block + 1) * layout_->block_tokens());
      held.push_back({begin, last, blocks_[g][block]});
      begin = last;
    }
    return held;
  }

  void CopyStrips(size_t layer, size_t head, const Range& range,
                  const uint8_t* keys, const uint8_t* values) const {
    const size_t block_tokens = layout_->block_tokens();
    GroupCopy copy;
    copy.dtype = layout_->dtype();
    copy.head_dim = layout_->layers()[layer].head_dim;
    copy.from_tokens = range.tokens();
    copy.to_tokens = block_tokens;
    for (size_t p = range.aligned_begin(); p < range.end; p += kKvGroup) {
      const BlockRef& block =
          blocks_[layout_->group_of(layer)][p / block_tokens];
      copy.first = std::max<size_t>(p, range.begin) - p;
      copy.last = std::min<size_t>(p + kKvGroup, range.end) - p;
      copy.from_group = (p - range.aligned_begin()) / kKvGroup;
      copy.to_group = p % block_tokens / kKvGroup;
      CopyKeyGroup(copy, keys,
                   block.data() + layout_->key_offset(layer, head));
      CopyValueGroup(copy, values,
                     block.data() + layout_->value_offset(layer, head));
    }
  }

  std::shared_ptr<const KvLayout> layout_;
  const SnapshotHeader& header_;
  // By group, then by block index; null: not held.
  std::vector<std::vector<BlockRef>> blocks_;
  std::vector<BlockRef> states_;  // as in the header
};

}  // namespace

std::unique_ptr<KVCache> ReadSnapshot(std::span<const uint8_t> bytes,
                                      const CacheOptions& options) {
  ByteReader reader(bytes);
  const SnapshotHeader header = DecodeSnapshotHeader(bytes, reader);
  std::shared_ptr<const KvLayout> layout;
  try {
    layout = std::make_shared<KvLayout>(header.layers, header.dtype,
                                        options.block_tokens);
  } catch (const InvalidArgument& error) {
    ThrowCorruptSnapshot(error.what());
  }
  const auto token_bytes =
      ReadSealed(reader, header.length * sizeof(int32_t), "token ids");
  const auto payload = ReadSealed(reader, SnapshotPayloadBytes(*layout, header),
                                  "keys and values");
  if (reader.remaining() != 0) {
    ThrowCorruptSnapshot(StrCat(reader.remaining(), " bytes follow the end"));
  }
  const std::vector<int32_t> tokens = DecodeTokens(token_bytes);

  CacheOptions full = options;
  if (full.capacity_tokens == 0) full.capacity_tokens = header.capacity_tokens;
  if (full.capacity_tokens < header.length) {
    throw CacheFull(StrCat("the snapshot holds ", header.length,
                             " tokens, expected at most the capacity of ",
                             full.capacity_tokens));
  }
  if (!full.checkpoint_bytes) full.checkpoint_bytes = header.checkpoint_bytes;
  if (!full.pool) full.pool = BlockPool::Default();
  auto cache = std::make_unique<KVCache>(layout, full, header.model_type);
  const Storage storage(layout, full.pool, header, payload.data());
  KvContent content(layout, full.pool);
  content.log.Append(tokens);
  content.computed = header.computed;
  content.fingerprint = header.fingerprint;
  storage.Restore(header.marks[0], content.groups);
  for (size_t i = 1; i < header.marks.size(); ++i) {
    const Mark& mark = header.marks[i];
    GroupSet groups = MakeGroups(layout, full.pool);
    for (auto& group : groups) {
      if (!group->forgets()) group.reset();
    }
    storage.Restore(mark, groups);
    if (ResumeAt(groups, mark.position) != mark.position) {
      ThrowCorruptSnapshot(StrCat("the checkpoint at position ", mark.position,
                                  " lacks a part of its window"));
    }
    content.checkpoints.Add(
        {mark.position, mark.length,
         std::make_shared<const GroupSet>(std::move(groups))},
        cache->checkpoint_bytes());
  }
  cache->Adopt(cache->Lock(), std::move(content));
  return cache;
}

}  // namespace gkv
