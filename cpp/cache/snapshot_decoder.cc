#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cache/full_cache.h"
#include "cache/recurrent_cache.h"
#include "cache/sliding_cache.h"
#include "cache/snapshot.h"
#include "cache/snapshot_payload.h"
#include "io/byte_io.h"

namespace gkv {
namespace {

using Range = SnapshotHeader::Range;
using Mark = SnapshotHeader::Mark;

std::span<const uint8_t> ReadSealed(ByteReader& reader, uint64_t size,
                                    const char* what) {
  const std::span<const uint8_t> bytes = reader.ReadBytes(size, what);
  if (ReadHash(reader, what) != HashBytes(bytes)) {
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
    const uint8_t* states =
        ForGroups(*layout_, header, payload,
                  [&](const PlaceOf<const uint8_t>& place) { Copy(place); });
    for (size_t i = 0; i < header.states.size(); ++i) {
      states_.push_back(pool->Acquire(layout_->state_bytes()));
    }
    ForStates(*layout_, header, states,
              [&](size_t i, size_t layer, const uint8_t* state) {
                std::memcpy(states_[i].data() + layout_->state_offset(layer),
                            state,
                            layout_->state_floats(layer) * sizeof(float));
              });
  }

  // Puts what a mark refers to, and the full layers' part, into empty groups.
  void Restore(const Mark& mark, GroupSet& groups) const {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!groups[g]) continue;
      const KvGroup& group = layout_->groups()[g];
      if (group.kind == LayerKind::kFull && header_.computed > 0) {
        static_cast<FullCache&>(*groups[g])
            .Restore(Blocks(g, 0, header_.computed), header_.computed);
      } else if (group.kind == LayerKind::kSliding) {
        const uint64_t begin = mark.sliding_begin.at(group.window);
        if (begin == mark.position) continue;
        static_cast<SlidingCache&>(*groups[g])
            .Restore(Blocks(g, begin, mark.position), begin, mark.position);
      } else if (group.kind == LayerKind::kRecurrent && mark.position > 0) {
        static_cast<RecurrentCache&>(*groups[g])
            .Restore(State(mark.position), mark.previous < mark.position
                                               ? State(mark.previous)
                                               : RecurrentCache::Snapshot{});
      }
    }
  }

 private:
  // Blocks of positions [begin, end).
  std::vector<BlockRef> Blocks(size_t group, size_t begin, size_t end) const {
    const size_t block_tokens = layout_->block_tokens();
    const auto first = blocks_[group].begin();
    return {first + static_cast<ptrdiff_t>(begin / block_tokens),
            first + static_cast<ptrdiff_t>((end - 1) / block_tokens + 1)};
  }

  void Copy(const PlaceOf<const uint8_t>& place) const {
    const size_t group = layout_->group_of(place.layer);
    const size_t block_tokens = layout_->block_tokens();
    uint8_t* block = blocks_[group][place.begin / block_tokens].data();
    GroupCopy copy;
    copy.dtype = layout_->dtype();
    copy.head_dim = layout_->layers()[place.layer].head_dim;
    copy.first = place.begin % kKvGroup;
    copy.last = copy.first + (place.end - place.begin);
    copy.from_tokens = place.strip_tokens;
    copy.from_group = place.strip_group;
    copy.to_tokens = block_tokens;
    copy.to_group = place.begin % block_tokens / kKvGroup;
    CopyKeyGroup(copy, place.keys,
                 block + layout_->key_offset(place.layer, place.head));
    CopyValueGroup(copy, place.values,
                   block + layout_->value_offset(place.layer, place.head));
  }

  RecurrentCache::Snapshot State(uint64_t position) const {
    const auto at = std::lower_bound(header_.states.begin(),
                                     header_.states.end(), position);
    return {position,
            states_[static_cast<size_t>(at - header_.states.begin())]};
  }

  std::shared_ptr<const KvLayout> layout_;
  const SnapshotHeader& header_;
  // By group, then by block index; null: not held.
  std::vector<std::vector<BlockRef>> blocks_;
  std::vector<BlockRef> states_;  // as in the header
};

}  // namespace

std::unique_ptr<KVCache> SnapshotDecoder::Decode(std::span<const uint8_t> bytes,
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
    throw OutOfBlocks(StrCat("the snapshot holds ", header.length,
                             " tokens, expected at most the capacity of ",
                             full.capacity_tokens));
  }
  if (!full.checkpoint_bytes) full.checkpoint_bytes = header.checkpoint_bytes;
  auto cache = std::make_unique<KVCache>(layout, full, header.model_type);
  const Storage storage(layout, cache->pool_, header, payload.data());
  KVCache::State& state = cache->state_;
  state.log.Append(tokens);
  state.computed = header.computed;
  state.fingerprint = header.fingerprint;
  storage.Restore(header.marks[0], state.groups);
  for (size_t i = 1; i < header.marks.size(); ++i) {
    const Mark& mark = header.marks[i];
    GroupSet groups = MakeGroups(layout, cache->pool_);
    for (auto& group : groups) {
      if (!group->forgets()) group.reset();
    }
    storage.Restore(mark, groups);
    if (ResumeAt(groups, mark.position) != mark.position) {
      ThrowCorruptSnapshot(StrCat("the checkpoint at position ", mark.position,
                                  " lacks a part of its window"));
    }
    state.checkpoints.Add({mark.position, mark.length,
                           std::make_shared<const GroupSet>(std::move(groups))},
                          cache->checkpoint_bytes());
  }
  return cache;
}

}  // namespace gkv
