#include <algorithm>
#include <cstring>
#include <utility>

#include "base/rounding.h"
#include "cache/kv_copy.h"
#include "cache/snapshot.h"

namespace gkv {
namespace {

using Range = SnapshotHeader::Range;
using Mark = SnapshotHeader::Mark;

constexpr size_t kPieceBytes = size_t{256} << 10;

}  // namespace

// Collects small parts into pieces for the sink, and ends each section with a
// checksum.
class SnapshotWriter::Sections {
 public:
  explicit Sections(const ByteSink& sink) : sink_(sink) {}

  // Returns zeroed bytes to write to, valid until the next call.
  uint8_t* Next(size_t size) {
    if (piece_.size() + size > kPieceBytes) Flush();
    piece_.resize(piece_.size() + size);
    return piece_.data() + piece_.size() - size;
  }
  void Append(const void* bytes, size_t size) {
    const auto* from = static_cast<const uint8_t*>(bytes);
    while (size > 0) {
      const size_t part = std::min(size, kPieceBytes);
      std::memcpy(Next(part), from, part);
      from += part;
      size -= part;
    }
  }
  void Seal() {
    UpdateHash();
    const Hash128 hash = std::exchange(hasher_, Hasher()).Finish();
    Append(&hash, sizeof(hash));
    hashed_ = piece_.size();
  }
  void Flush() {
    UpdateHash();
    if (!piece_.empty()) sink_(piece_);
    piece_.clear();
    hashed_ = 0;
  }

 private:
  void UpdateHash() {
    hasher_.Update(std::span(piece_).subspan(hashed_));
    hashed_ = piece_.size();
  }

  const ByteSink& sink_;
  std::vector<uint8_t> piece_;
  size_t hashed_ = 0;  // bytes of the piece
  Hasher hasher_;
};

SnapshotWriter::SnapshotWriter(const Conversation& cache, bool checkpoints)
    : layout_(cache.layout_ptr()),
      content_(cache.Export()),
      held_(layout_->groups().size()) {
  header_.dtype = layout_->dtype();
  header_.fingerprint = content_.fingerprint;
  header_.model_type = cache.model_type();
  header_.capacity_tokens = cache.capacity_tokens();
  header_.checkpoint_bytes = cache.checkpoint_bytes();
  header_.length = content_.log.size();
  header_.computed = content_.computed;
  header_.layers = layout_->layers();
  const GroupSet& groups = content_.groups;
  const size_t present = ResumeAt(groups, content_.computed).value_or(0);
  // Nothing is stored of an unfinished warm-up: it starts anew.
  const bool usable = ResumeAt(groups, present) == present;
  AddMark(groups, usable ? present : 0, header_.length);
  if (checkpoints) {
    for (const Checkpoint& c : content_.checkpoints.list()) {
      AddMark(*c.groups, c.position, c.length);
    }
  }
  CompleteHeader();
  size_bytes_ = EncodeSnapshotHeader(header_, 0).size() +
                header_.length * sizeof(int32_t) +
                SnapshotPayloadBytes(*layout_, header_) + 2 * sizeof(Hash128);
}

// Adds a mark with what groups hold for going on at `position`.
void SnapshotWriter::AddMark(const GroupSet& groups, size_t position,
                             size_t length) {
  Mark mark{position, length, position, {}};
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g]) continue;
    const size_t window = layout_->groups()[g].window;
    if (window != 0) mark.sliding_begin[window] = position;
    for (HeldBlock& held : groups[g]->Export(
             groups[g]->forgets() ? position : content_.computed)) {
      if (held.begin == held.end) {
        if (held.end < position) mark.previous = held.end;
        held_[g][held.end].assign(1, held);
        continue;
      }
      if (window != 0 && held.begin < mark.sliding_begin[window]) {
        mark.sliding_begin[window] = held.begin;
        header_.sliding[window].push_back({held.begin, position});
      }
      auto& there = held_[g][held.begin / layout_->block_tokens()];
      if (std::none_of(there.begin(), there.end(), [&](const HeldBlock& h) {
            return h.begin <= held.begin && held.end <= h.end;
          })) {
        there.push_back(std::move(held));
      }
    }
  }
  header_.marks.push_back(std::move(mark));
}

// Completes the header with the unions of what sliding layers hold, ascending
// and disjoint, and with all states.
void SnapshotWriter::CompleteHeader() {
  for (auto& [window, held] : header_.sliding) {
    std::sort(held.begin(), held.end(), [](const Range& a, const Range& b) {
      return a.begin < b.begin;
    });
    std::vector<Range> ranges;
    for (const Range& range : held) {
      if (!ranges.empty() && range.begin <= ranges.back().end) {
        ranges.back().end = std::max(ranges.back().end, range.end);
      } else {
        ranges.push_back(range);
      }
    }
    held = std::move(ranges);
  }
  for (size_t g = 0; g < held_.size(); ++g) {
    if (layout_->groups()[g].kind != LayerKind::kRecurrent) continue;
    for (const auto& [position, state] : held_[g]) {
      header_.states.push_back(position);
    }
  }
}

void SnapshotWriter::Write(const ByteSink& sink) const {
  sink(EncodeSnapshotHeader(header_, size_bytes_));
  Sections out(sink);
  std::vector<int32_t> tokens(header_.length);
  content_.log.Copy(0, tokens);
  out.Append(tokens.data(), tokens.size() * sizeof(int32_t));
  out.Seal();
  ForRanges(*layout_, header_, [&](size_t layer, const Range& range) {
    for (size_t i = 0; i < 2 * layout_->layers()[layer].kv_heads; ++i) {
      WriteStrip(layer, i / 2, range, i % 2 == 1, out);
    }
  });
  for (size_t g = 0; g < held_.size(); ++g) {
    if (layout_->groups()[g].kind != LayerKind::kRecurrent) continue;
    for (const auto& [position, state] : held_[g]) {
      const uint8_t* const from = state[0].block.data();
      ForStates(*layout_, [&](size_t offset, size_t bytes) {
        out.Append(from + offset, bytes);
      });
    }
  }
  out.Seal();
  out.Flush();
}

// Token groups of a strip are adjacent, so a run of them is a strip of its own;
// but in int8 the scales come after the numbers of all.
void SnapshotWriter::WriteStrip(size_t layer, size_t head, const Range& range,
                                bool values, Sections& out) const {
  const KvDtype dtype = layout_->dtype();
  const size_t head_dim = layout_->layers()[layer].head_dim;
  const size_t group_bytes = KvStripBytes(dtype, kKvGroup, head_dim);
  const size_t run =
      std::max<size_t>(1, kPieceBytes / group_bytes) * kKvGroup;
  const auto for_runs = [&](const auto& fn) {
    for (size_t p = range.aligned_begin(); p < range.end; p += run) {
      const size_t end = std::min<size_t>(p + run, range.end);
      const size_t tokens = RoundUp(end - p, kKvGroup);
      fn(std::max<size_t>(p, range.begin), end, tokens,
         tokens / kKvGroup * group_bytes);
    }
  };
  if (dtype != KvDtype::kInt8) {
    for_runs([&](size_t begin, size_t end, size_t tokens, size_t bytes) {
      CopyTokens(layer, head, values, begin, end, out.Next(bytes), tokens);
    });
    return;
  }
  std::vector<uint8_t> strip;
  for (const bool scales : {false, true}) {
    for_runs([&](size_t begin, size_t end, size_t tokens, size_t bytes) {
      strip.assign(bytes, 0);
      CopyTokens(layer, head, values, begin, end, strip.data(), tokens);
      const size_t numbers = tokens * head_dim;
      out.Append(strip.data() + (scales ? numbers : 0),
                 scales ? bytes - numbers : numbers);
    });
  }
}

// Copies positions [begin, end) out of the blocks that hold them. Only what is
// held is copied: bytes of others never leave the process.
void SnapshotWriter::CopyTokens(size_t layer, size_t head, bool values,
                                size_t begin, size_t end, uint8_t* strip,
                                size_t strip_tokens) const {
  const auto& held = held_[layout_->group_of(layer)];
  const size_t block_tokens = layout_->block_tokens();
  const size_t offset = values ? layout_->value_offset(layer, head)
                               : layout_->key_offset(layer, head);
  layout_->ForBlocks(begin, end, [&](size_t block, size_t from, size_t to) {
    for (const HeldBlock& part : held.at(block)) {
      const size_t part_begin = std::max(from, part.begin);
      const size_t part_end = std::min(to, part.end);
      if (part_begin >= part_end) continue;
      CopyStrip(
          *layout_, layer, values, part_begin, part_end,
          {part.block.data() + offset, block * block_tokens, block_tokens},
          {strip, begin / kKvGroup * kKvGroup, strip_tokens});
    }
  });
}

}  // namespace gkv
