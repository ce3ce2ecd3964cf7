#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "cache/block_table.h"
#include "cache/recurrent_cache.h"
#include "cache/snapshot.h"
#include "cache/snapshot_payload.h"

namespace gkv {
namespace {

using Range = SnapshotHeader::Range;
using Mark = SnapshotHeader::Mark;

// Collects what a snapshot is to hold, and where it lies.
class Contents {
 public:
  explicit Contents(const KvLayout& layout)
      : layout_(layout), pieces_(layout.groups().size()) {}

  void AddFull(const GroupSet& groups, size_t end) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (layout_.groups()[g].kind == LayerKind::kFull) {
        AddTable(groups, g, 0, end);
      }
    }
  }

  // What the groups hold for going on at `position`.
  Mark AddMark(const GroupSet& groups, size_t position, size_t length) {
    Mark mark{position, length, position, {}};
    for (size_t g = 0; g < groups.size(); ++g) {
      const KvGroup& kind = layout_.groups()[g];
      if (kind.kind == LayerKind::kSliding) {
        const size_t begin = std::min(position, groups[g]->Held().first);
        mark.sliding_begin[kind.window] = begin;
        AddTable(groups, g, begin, position);
        if (begin < position) held_[kind.window].push_back({begin, position});
      } else if (kind.kind == LayerKind::kRecurrent) {
        const auto& group = static_cast<const RecurrentCache&>(*groups[g]);
        for (const auto& state : {group.current(), group.previous()}) {
          if (!state.state || state.position > position) continue;
          states_[state.position] = state.state.data();
          if (state.position < position) mark.previous = state.position;
        }
      }
    }
    return mark;
  }

  // The unions of what sliding layers hold, ascending and apart.
  std::map<size_t, std::vector<Range>> SlidingRanges() {
    std::map<size_t, std::vector<Range>> by_window;
    for (auto& [window, held] : held_) {
      std::sort(held.begin(), held.end(), [](const Range& a, const Range& b) {
        return a.begin < b.begin;
      });
      std::vector<Range>& ranges = by_window[window];
      for (const Range& range : held) {
        if (!ranges.empty() && range.begin <= ranges.back().end) {
          ranges.back().end = std::max(ranges.back().end, range.end);
        } else {
          ranges.push_back(range);
        }
      }
    }
    return by_window;
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
    const size_t group = layout_.group_of(place.layer);
    const size_t block_tokens = layout_.block_tokens();
    const auto pieces = pieces_[group].find(place.begin / block_tokens);
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

  void AddTable(const GroupSet& groups, size_t group, size_t begin,
                size_t end) {
    if (begin == end) return;
    const BlockTable& table = *groups[group]->table();
    const size_t block_tokens = layout_.block_tokens();
    for (size_t i = begin / block_tokens; i * block_tokens < end; ++i) {
      const Piece piece{table.blocks()[i - table.first_block()].data(),
                        std::max(begin, i * block_tokens),
                        std::min(end, (i + 1) * block_tokens)};
      std::vector<Piece>& pieces = pieces_[group][i];
      const bool there =
          std::any_of(pieces.begin(), pieces.end(), [&](const Piece& other) {
            return other.begin <= piece.begin && piece.end <= other.end;
          });
      if (!there) pieces.push_back(piece);
    }
  }

  const KvLayout& layout_;
  // By group, then by block index.
  std::vector<std::map<size_t, std::vector<Piece>>> pieces_;
  std::map<size_t, std::vector<Range>> held_;  // by window
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
    at_ += kSnapshotSealBytes;
  }

 private:
  uint8_t* at_;
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
      header_bytes + token_bytes + payload + 2 * kSnapshotSealBytes;
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

}  // namespace gkv
