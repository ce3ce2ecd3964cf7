#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/kv_copy.h"
#include "cache/snapshot.h"

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
    for (size_t g = 0; g < blocks_.size(); ++g) {
      const KvGroup& group = layout_->groups()[g];
      const auto acquire = [&](size_t block, size_t, size_t) {
        blocks_[g].resize(std::max(blocks_[g].size(), block + 1));
        // Two ranges may lie in one block.
        BlockRef& ref = blocks_[g][block];
        if (!ref) ref = pool->Acquire(group.block_bytes);
      };
      for (const Range& range : header.ranges(group)) {
        layout_->ForBlocks(range.begin, range.end, acquire);
      }
    }
    ForRanges(*layout_, header, [&](size_t layer, const Range& range) {
      const KvStrips<const uint8_t> source = {payload, range.aligned_begin(),
                                              range.tokens()};
      const auto& blocks = blocks_[layout_->group_of(layer)];
      layout_->ForBlocks(
          range.begin, range.end, [&](size_t block, size_t from, size_t to) {
            CopyLayer(*layout_, layer, from, to, source,
                      StripsIn(*layout_, layer, blocks[block].data(), from));
          });
      payload += RangeBytes(*layout_, layer, range);
    });
    for (size_t i = 0; i < header.states.size(); ++i) {
      states_.push_back(pool->Acquire(layout_->state_bytes()));
      ForStates(*layout_, [&](size_t offset, size_t bytes) {
        std::memcpy(states_[i].data() + offset, payload, bytes);
        payload += bytes;
      });
    }
  }

  // Puts into empty groups what a mark refers to, and the full layers' part.
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
    const uint64_t begin = slides ? mark.sliding_begin.at(group.window) : 0;
    layout_->ForBlocks(begin, end, [&](size_t block, size_t from, size_t to) {
      held.push_back({from, to, blocks_[g][block]});
    });
    return held;
  }

  std::shared_ptr<const KvLayout> layout_;
  const SnapshotHeader& header_;
  // By group, then by block index; null: not held.
  std::vector<std::vector<BlockRef>> blocks_;
  std::vector<BlockRef> states_;  // as in the header
};

}  // namespace

std::unique_ptr<Conversation> Conversation::FromBytes(
    std::span<const uint8_t> bytes, CacheOptions options) {
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

  if (options.capacity_tokens == 0) {
    options.capacity_tokens = header.capacity_tokens;
  }
  if (options.capacity_tokens < header.length) {
    throw CacheFull(StrCat("the snapshot holds ", header.length,
                           " tokens, expected at most the capacity of ",
                           options.capacity_tokens));
  }
  if (!options.checkpoint_bytes) {
    options.checkpoint_bytes = header.checkpoint_bytes;
  }
  if (!options.pool) options.pool = BlockPool::Default();
  auto cache =
      std::make_unique<Conversation>(layout, options, header.model_type);
  const Storage storage(layout, options.pool, header, payload.data());
  KvContent content(layout, options.pool);
  content.log.Append(tokens);
  content.computed = header.computed;
  content.fingerprint = header.fingerprint;
  storage.Restore(header.marks[0], content.groups);
  for (size_t i = 1; i < header.marks.size(); ++i) {
    const Mark& mark = header.marks[i];
    GroupSet groups = MakeGroups(layout, options.pool);
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
