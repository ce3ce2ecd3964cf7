// What checkpoints and the present hold overlaps, and where it does it is the
// same: keys, values and states follow from the tokens before them. So a
// snapshot stores every position once, and a restored cache shares one block
// between all that hold a part of it.

#include "cache/snapshot.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "cache/block_table.h"
#include "cache/full_cache.h"
#include "cache/recurrent_cache.h"
#include "cache/sliding_cache.h"
#include "cache/snapshot_format.h"
#include "io/byte_io.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

using Range = SnapshotHeader::Range;
using Mark = SnapshotHeader::Mark;

constexpr size_t kChecksumBytes = sizeof(Hash128);

size_t Index(GroupId group) { return static_cast<size_t>(group); }

// A token group of one kv head: where its positions [begin, end) lie in the
// payload.
template <typename Byte>
struct PlaceOf {
  size_t layer;
  size_t head;
  size_t begin, end;  // held positions, of one token group
  Byte* keys;         // strips of the payload
  Byte* values;
  size_t strip_tokens;
  size_t strip_group;
};

// Calls fn for every token group in the payload, in order. Returns the end.
template <typename Byte, typename Fn>
Byte* ForGroups(const KvLayout& layout, const SnapshotHeader& header,
                Byte* payload, const Fn& fn) {
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    const KvLayerSpec& spec = layout.layers()[layer];
    for (const Range& range : header.ranges(layout.group(layer))) {
      const size_t strip_bytes =
          KvStripBytes(layout.dtype(), range.tokens(), spec.head_dim);
      for (size_t head = 0; head < spec.kv_heads; ++head) {
        for (size_t p = range.aligned_begin(); p < range.end; p += kKvGroup) {
          fn(PlaceOf<Byte>{layer, head, std::max<size_t>(p, range.begin),
                           std::min<size_t>(p + kKvGroup, range.end), payload,
                           payload + strip_bytes, range.tokens(),
                           (p - range.aligned_begin()) / kKvGroup});
        }
        payload += 2 * strip_bytes;
      }
    }
  }
  return payload;
}

// Calls fn(state index, layer, bytes) for every recurrent state in the payload.
template <typename Byte, typename Fn>
void ForStates(const KvLayout& layout, const SnapshotHeader& header,
               Byte* payload, const Fn& fn) {
  for (size_t i = 0; i < header.states.size(); ++i) {
    for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
      if (layout.group(layer) != GroupId::kRecurrent) continue;
      fn(i, layer, payload);
      payload += layout.state_floats(layer) * sizeof(float);
    }
  }
}

// Collects what a snapshot is to hold, and where it lies.
class Contents {
 public:
  explicit Contents(const KvLayout& layout) : layout_(layout) {}

  void AddFull(const GroupSet& groups, size_t end) {
    if (layout_.has_group(GroupId::kFull)) {
      AddTable(groups, GroupId::kFull, 0, end);
    }
  }

  // What the groups hold for going on at `position`.
  Mark AddMark(const GroupSet& groups, size_t position, size_t length) {
    Mark mark{position, length, position, position};
    if (layout_.has_group(GroupId::kSliding)) {
      mark.sliding_begin =
          std::min(position, groups[Index(GroupId::kSliding)]->Held().first);
      AddTable(groups, GroupId::kSliding, mark.sliding_begin, position);
      if (mark.sliding_begin < position) {
        held_.push_back({mark.sliding_begin, position});
      }
    }
    if (layout_.has_group(GroupId::kRecurrent)) {
      const RecurrentCache& group = RecurrentGroup(groups);
      for (const auto* state : {&group.current(), &group.previous()}) {
        if (!state->state || state->position > position) continue;
        states_[state->position] = state->state.data();
        if (state->position < position) mark.previous = state->position;
      }
    }
    return mark;
  }

  // The union of what sliding layers hold, ascending and apart.
  std::vector<Range> SlidingRanges() {
    std::sort(held_.begin(), held_.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::vector<Range> ranges;
    for (const Range& range : held_) {
      if (!ranges.empty() && range.begin <= ranges.back().end) {
        ranges.back().end = std::max(ranges.back().end, range.end);
      } else {
        ranges.push_back(range);
      }
    }
    return ranges;
  }

  std::vector<uint64_t> StatePositions() const {
    std::vector<uint64_t> positions;
    for (const auto& [position, state] : states_) positions.push_back(position);
    return positions;
  }
  const uint8_t* state(uint64_t position) const { return states_.at(position); }

  // Copies the positions of a place out of the blocks that hold them. Strips
  // start as zeros, and only positions that are held are copied: bytes of
  // others never leave the process.
  void Copy(const PlaceOf<uint8_t>& place) const {
    const GroupId group = layout_.group(place.layer);
    const size_t block_tokens = layout_.block_tokens();
    const auto pieces = pieces_[Index(group)].find(place.begin / block_tokens);
    for (const Piece& piece : pieces->second) {
      const size_t begin = std::max(piece.begin, place.begin);
      const size_t end = std::min(piece.end, place.end);
      if (begin >= end) continue;
      GroupCopy copy;
      copy.dtype = layout_.dtype();
      copy.head_dim = layout_.layers()[place.layer].head_dim;
      copy.first = begin % kKvGroup;
      copy.last = copy.first + (end - begin);
      copy.from_tokens = block_tokens;
      copy.from_group = begin % block_tokens / kKvGroup;
      copy.to_tokens = place.strip_tokens;
      copy.to_group = place.strip_group;
      CopyKeyGroup(copy,
                   piece.block + layout_.key_offset(place.layer, place.head),
                   place.keys);
      CopyValueGroup(
          copy, piece.block + layout_.value_offset(place.layer, place.head),
          place.values);
    }
  }

 private:
  // Positions [begin, end), which lie in one block.
  struct Piece {
    const uint8_t* block;
    size_t begin, end;
  };

  void AddTable(const GroupSet& groups, GroupId group, size_t begin,
                size_t end) {
    if (begin == end) return;
    const BlockTable& table = AttentionTable(groups, group);
    const size_t block_tokens = layout_.block_tokens();
    for (size_t i = begin / block_tokens; i * block_tokens < end; ++i) {
      const Piece piece{table.blocks()[i - table.first_block()].data(),
                        std::max(begin, i * block_tokens),
                        std::min(end, (i + 1) * block_tokens)};
      std::vector<Piece>& pieces = pieces_[Index(group)][i];
      const bool there =
          std::any_of(pieces.begin(), pieces.end(), [&](const Piece& other) {
            return other.begin <= piece.begin && piece.end <= other.end;
          });
      if (!there) pieces.push_back(piece);
    }
  }

  const KvLayout& layout_;
  std::map<size_t, std::vector<Piece>> pieces_[kNumGroups];  // by block index
  std::vector<Range> held_;
  std::map<uint64_t, const uint8_t*> states_;
};

// Appends parts of the payload, each followed by its checksum.
class SealedWriter {
 public:
  explicit SealedWriter(uint8_t* at) : at_(at) {}

  uint8_t* at() const { return at_; }
  void Seal(size_t size) {
    const Hash128 hash = HashBytes({at_, size});
    at_ += size;
    std::memcpy(at_, &hash.low, sizeof(hash.low));
    std::memcpy(at_ + sizeof(hash.low), &hash.high, sizeof(hash.high));
    at_ += kChecksumBytes;
  }

 private:
  uint8_t* at_;
};

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
      : layout_(layout), header_(header) {
    const size_t block_tokens = layout_->block_tokens();
    for (const GroupId id : {GroupId::kFull, GroupId::kSliding}) {
      for (const Range& range : header.ranges(id)) {
        if (!layout_->has_group(id)) break;
        const size_t end = (range.end - 1) / block_tokens + 1;
        std::vector<BlockRef>& blocks = blocks_[Index(id)];
        blocks.resize(std::max(blocks.size(), end));
        for (size_t i = range.begin / block_tokens; i < end; ++i) {
          // Two ranges may lie in one block.
          if (!blocks[i]) blocks[i] = pool->Acquire(layout_->block_bytes(id));
        }
      }
    }
    const uint8_t* states =
        ForGroups(*layout_, header, payload,
                  [&](const PlaceOf<const uint8_t>& place) { Copy(place); });
    for (size_t i = 0; i < header.states.size(); ++i) {
      states_.push_back(
          pool->Acquire(layout_->block_bytes(GroupId::kRecurrent)));
    }
    ForStates(*layout_, header, states,
              [&](size_t i, size_t layer, const uint8_t* state) {
                std::memcpy(states_[i].data() + layout_->state_offset(layer),
                            state,
                            layout_->state_floats(layer) * sizeof(float));
              });
  }

  // Blocks of positions [begin, end).
  std::vector<BlockRef> Blocks(GroupId id, size_t begin, size_t end) const {
    const size_t block_tokens = layout_->block_tokens();
    const auto first = blocks_[Index(id)].begin();
    return {first + static_cast<ptrdiff_t>(begin / block_tokens),
            first + static_cast<ptrdiff_t>((end - 1) / block_tokens + 1)};
  }

  // Puts what a mark refers to into empty groups.
  void Restore(const Mark& mark, GroupSet& groups) const {
    if (layout_->has_group(GroupId::kSliding) &&
        mark.sliding_begin < mark.position) {
      static_cast<SlidingCache&>(*groups[Index(GroupId::kSliding)])
          .Restore(Blocks(GroupId::kSliding, mark.sliding_begin, mark.position),
                   mark.sliding_begin, mark.position);
    }
    if (layout_->has_group(GroupId::kRecurrent) && mark.position > 0) {
      static_cast<RecurrentCache&>(*groups[Index(GroupId::kRecurrent)])
          .Restore(State(mark.position), mark.previous < mark.position
                                             ? State(mark.previous)
                                             : RecurrentCache::Snapshot{});
    }
  }

 private:
  void Copy(const PlaceOf<const uint8_t>& place) const {
    const GroupId group = layout_->group(place.layer);
    const size_t block_tokens = layout_->block_tokens();
    uint8_t* block = blocks_[Index(group)][place.begin / block_tokens].data();
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
  std::vector<BlockRef> blocks_[kNumGroups];  // by block index; null: not held
  std::vector<BlockRef> states_;              // as in the header
};

}  // namespace

std::vector<uint8_t> SnapshotEncoder::Encode(const KVCache& cache,
                                             bool checkpoints) {
  const KvLayout& layout = cache.layout();
  const KVCache::State& state = cache.state_;
  Contents contents(layout);
  contents.AddFull(state.groups, state.computed);
  SnapshotHeader header;
  header.dtype = layout.dtype();
  header.fingerprint = state.fingerprint;
  header.model_type = cache.model_type();
  header.capacity_tokens = cache.capacity_tokens();
  header.checkpoint_bytes = cache.checkpoint_bytes();
  header.length = state.log.size();
  header.computed = state.computed;
  header.layers = layout.layers();
  const size_t present = ResumeAt(state.groups, state.computed).value_or(0);
  // Nothing is stored of a warm-up under way: it starts anew.
  const bool usable = ResumeAt(state.groups, present) == present;
  header.marks.push_back(
      contents.AddMark(state.groups, usable ? present : 0, header.length));
  if (checkpoints) {
    for (const Checkpoint& c : state.checkpoints.list()) {
      header.marks.push_back(contents.AddMark(*c.groups, c.position, c.length));
    }
  }
  header.sliding = contents.SlidingRanges();
  header.states = contents.StatePositions();

  const uint64_t token_bytes = header.length * sizeof(int32_t);
  const uint64_t payload = SnapshotPayloadBytes(layout, header);
  const uint64_t header_bytes = EncodeSnapshotHeader(header, 0).size();
  const uint64_t total =
      header_bytes + token_bytes + payload + 2 * kChecksumBytes;
  std::vector<uint8_t> out = EncodeSnapshotHeader(header, total);
  out.resize(total);
  SealedWriter writer(out.data() + header_bytes);
  std::vector<int32_t> tokens(header.length);
  state.log.Copy(0, tokens);
  if (!tokens.empty()) std::memcpy(writer.at(), tokens.data(), token_bytes);
  writer.Seal(token_bytes);
  uint8_t* states =
      ForGroups(layout, header, writer.at(),
                [&](const PlaceOf<uint8_t>& place) { contents.Copy(place); });
  ForStates(layout, header, states, [&](size_t i, size_t layer, uint8_t* to) {
    std::memcpy(to,
                contents.state(header.states[i]) + layout.state_offset(layer),
                layout.state_floats(layer) * sizeof(float));
  });
  writer.Seal(payload);
  return out;
}

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
  if (layout->has_group(GroupId::kFull) && header.computed > 0) {
    static_cast<FullCache&>(*state.groups[Index(GroupId::kFull)])
        .Restore(storage.Blocks(GroupId::kFull, 0, header.computed),
                 header.computed);
  }
  storage.Restore(header.marks[0], state.groups);
  for (size_t i = 1; i < header.marks.size(); ++i) {
    const Mark& mark = header.marks[i];
    GroupSet groups = MakeGroups(layout, cache->pool_);
    groups[Index(GroupId::kFull)].reset();
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
