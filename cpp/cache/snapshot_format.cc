#include "cache/snapshot_format.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace gkv {
namespace {

// Sizes that no sound snapshot exceeds; they keep every product far from
// overflow.
constexpr uint64_t kMaxTokens = uint64_t{1} << 28;
constexpr uint32_t kMaxNameBytes = 256;

void WriteSpec(ByteWriter& writer, const KvLayerSpec& spec, uint32_t version) {
  const bool recurrent = spec.kind == LayerKind::kRecurrent;
  writer.Write(static_cast<uint32_t>(spec.kind));
  writer.Write(
      static_cast<uint32_t>(recurrent ? spec.lru_width : spec.kv_heads));
  writer.Write(
      static_cast<uint32_t>(recurrent ? spec.conv_tail : spec.head_dim));
  writer.Write(static_cast<uint32_t>(spec.window));
  if (version < 3) return;
  writer.Write(static_cast<uint32_t>(spec.shares ? *spec.shares + 1 : 0));
}

KvLayerSpec ReadSpec(ByteReader& reader, uint32_t layer, uint32_t version) {
  const LayerKind last_kind =
      version == 1 ? LayerKind::kSliding : LayerKind::kRecurrent;
  const uint32_t kind = reader.Read<uint32_t>("layer kind");
  if (kind > static_cast<uint32_t>(last_kind)) {
    ThrowCorruptSnapshot(StrCat("layer ", layer, ": kind is ", kind,
                                ", expected 0..",
                                static_cast<uint32_t>(last_kind)));
  }
  KvLayerSpec spec{static_cast<LayerKind>(kind)};
  const bool recurrent = spec.kind == LayerKind::kRecurrent;
  (recurrent ? spec.lru_width : spec.kv_heads) =
      reader.Read<uint32_t>("width of a layer");
  (recurrent ? spec.conv_tail : spec.head_dim) =
      reader.Read<uint32_t>("depth of a layer");
  spec.window = reader.Read<uint32_t>("window");
  if (version < 3) return spec;
  const uint32_t shares = reader.Read<uint32_t>("shared layer");
  if (shares > 0) spec.shares = shares - 1;
  return spec;
}

void Check(const char* what, uint64_t value, uint64_t low, uint64_t high) {
  CheckRange<CorruptFile>(value, low, high, "snapshot: ", what);
}

KvDtype DecodeDtype(uint32_t id) {
  Check("kv dtype", id, 0, static_cast<uint32_t>(KvDtype::kInt8));
  return static_cast<KvDtype>(id);
}

std::set<size_t> Windows(const std::vector<KvLayerSpec>& layers) {
  std::set<size_t> windows;
  for (const KvLayerSpec& spec : layers) {
    if (spec.kind == LayerKind::kSliding) windows.insert(spec.window);
  }
  return windows;
}

uint32_t VersionFor(const std::vector<KvLayerSpec>& layers) {
  const bool shares =
      std::any_of(layers.begin(), layers.end(),
                  [](const KvLayerSpec& spec) { return spec.shares; });
  return shares || Windows(layers).size() > 1 ? 3 : 2;
}

bool Recurs(const KvLayerSpec& spec) {
  return spec.kind == LayerKind::kRecurrent;
}

bool HasState(const SnapshotHeader& h, uint64_t position) {
  return std::binary_search(h.states.begin(), h.states.end(), position);
}

// Throws unless everything that a mark refers to is there.
void CheckMark(const SnapshotHeader& h, const SnapshotHeader::Mark& mark) {
  Check("position of a mark", mark.position, 0, h.computed);
  Check("length of a mark", mark.length, mark.position, h.length);
  Check("previous state of a mark", mark.previous, 0, mark.position);
  for (const auto& [window, begin] : mark.sliding_begin) {
    Check("sliding begin of a mark", begin, 0, mark.position);
    const auto ranges = h.sliding.find(window);
    const bool held =
        ranges != h.sliding.end() &&
        std::any_of(ranges->second.begin(), ranges->second.end(),
                    [&, from = begin](const SnapshotHeader::Range& range) {
                      return range.begin <= from && mark.position <= range.end;
                    });
    if (begin < mark.position && !held) {
      ThrowCorruptSnapshot(StrCat("positions ", begin, "..", mark.position,
                                  " of sliding layers are not there"));
    }
  }
  const bool recurs = std::any_of(h.layers.begin(), h.layers.end(), Recurs);
  if (recurs && mark.position > 0 && !HasState(h, mark.position)) {
    ThrowCorruptSnapshot(
        StrCat("the state at position ", mark.position, " is not there"));
  }
  if (mark.previous < mark.position && !HasState(h, mark.previous)) {
    ThrowCorruptSnapshot(
        StrCat("the state at position ", mark.previous, " is not there"));
  }
}

// Throws unless the counts fit together. Nothing is computed from them before.
void CheckHeader(const SnapshotHeader& h) {
  Check("capacity", h.capacity_tokens, 1, kMaxTokens);
  Check("length", h.length, 0, h.capacity_tokens);
  Check("computed length", h.computed, 0, h.length);
  const std::set<size_t> windows = Windows(h.layers);
  for (const auto& [window, ranges] : h.sliding) {
    if (!windows.contains(window)) {
      ThrowCorruptSnapshot(
          StrCat("it holds a window of ", window, ", expected none",
                 windows.empty() ? ": no layer slides" : " of that size"));
    }
    uint64_t last = 0;
    for (const SnapshotHeader::Range& range : ranges) {
      Check("sliding end", range.end, 1, h.computed);
      Check("sliding begin", range.begin, last, range.end - 1);
      last = range.end;
    }
  }
  uint64_t last = 0;
  for (const uint64_t position : h.states) {
    Check("position of a state", position, last + 1, h.computed);
    last = position;
  }
  if (!h.states.empty() &&
      std::none_of(h.layers.begin(), h.layers.end(), Recurs)) {
    ThrowCorruptSnapshot("it holds a state, expected none: no layer recurs");
  }
  Check("number of marks", h.marks.size(), 1, h.computed + 1);
  for (size_t i = 0; i < h.marks.size(); ++i) {
    CheckMark(h, h.marks[i]);
    if (i == 0) continue;
    Check("position of a checkpoint", h.marks[i].position,
          i > 1 ? h.marks[i - 1].position + 1 : 1, h.computed);
    Check("length of a checkpoint", h.marks[i].length,
          i > 1 ? h.marks[i - 1].length : 1, h.length);
  }
}

// Reads the five counts of version 1. The last two say what sliding layers
// hold.
SnapshotHeader::Range ReadCounts1(ByteReader& reader, SnapshotHeader& header) {
  header.capacity_tokens = reader.Read<uint64_t>("capacity");
  header.length = reader.Read<uint64_t>("length");
  header.computed = reader.Read<uint64_t>("computed length");
  SnapshotHeader::Range held;
  held.begin = reader.Read<uint64_t>("sliding begin");
  held.end = reader.Read<uint64_t>("sliding end");
  Check("sliding begin", held.begin, 0, held.end);
  if (held.begin == held.end) Check("end of an empty range", held.end, 0, 0);
  return held;
}

void AddMark1(const SnapshotHeader::Range& held, SnapshotHeader& header) {
  const std::set<size_t> windows = Windows(header.layers);
  const size_t window = windows.empty() ? 0 : *windows.begin();
  if (held.begin < held.end) header.sliding[window] = {held};
  header.marks.push_back(
      {held.end, header.length, held.end, {{window, held.begin}}});
}

// Reads marks and sliding ranges. Before version 3 there is one window at most.
void ReadMarks(ByteReader& reader, uint32_t version, uint32_t num_marks,
               uint32_t num_ranges, SnapshotHeader& header) {
  std::set<size_t> windows = Windows(header.layers);
  if (windows.empty() && version < 3) windows.insert(0);
  for (uint32_t i = 0; i < num_marks; ++i) {
    SnapshotHeader::Mark mark;
    mark.position = reader.Read<uint64_t>("position of a mark");
    mark.length = reader.Read<uint64_t>("length of a mark");
    for (const size_t window : windows) {
      mark.sliding_begin[window] =
          reader.Read<uint64_t>("sliding begin of a mark");
    }
    mark.previous = reader.Read<uint64_t>("previous state of a mark");
    header.marks.push_back(std::move(mark));
  }
  for (uint32_t i = 0; i < num_ranges; ++i) {
    const uint64_t window =
        version < 3 ? *windows.begin() : reader.Read<uint64_t>("window");
    const uint64_t begin = reader.Read<uint64_t>("sliding begin");
    header.sliding[window].push_back(
        {begin, reader.Read<uint64_t>("sliding end")});
  }
}

}  // namespace

void ThrowCorruptSnapshot(const std::string& what) {
  throw CorruptFile("snapshot: " + what);
}

std::vector<SnapshotHeader::Range> SnapshotHeader::ranges(
    const KvGroup& group) const {
  if (group.kind == LayerKind::kFull && computed > 0) return {{0, computed}};
  const auto held = sliding.find(group.window);
  if (group.kind != LayerKind::kSliding || held == sliding.end()) return {};
  return held->second;
}

std::vector<uint8_t> EncodeSnapshotHeader(const SnapshotHeader& header,
                                          uint64_t total_bytes) {
  const uint32_t version = VersionFor(header.layers);
  size_t num_ranges = 0;
  for (const auto& [window, ranges] : header.sliding) {
    num_ranges += ranges.size();
  }
  ByteWriter writer;
  writer.WriteBytes(AsBytes(kSnapshotMagic));
  writer.Write(version);
  writer.Write(static_cast<uint32_t>(header.dtype));
  writer.Write(total_bytes);
  writer.Write(header.fingerprint);
  writer.Write(header.capacity_tokens);
  writer.Write(header.length);
  writer.Write(header.computed);
  writer.Write(header.checkpoint_bytes.value_or(0));
  writer.Write(static_cast<uint32_t>(header.model_type.size()));
  writer.Write(static_cast<uint32_t>(header.layers.size()));
  writer.Write(static_cast<uint32_t>(header.marks.size()));
  writer.Write(static_cast<uint32_t>(num_ranges));
  writer.Write(static_cast<uint32_t>(header.states.size()));
  writer.WriteBytes(AsBytes(header.model_type));
  for (const KvLayerSpec& spec : header.layers) {
    WriteSpec(writer, spec, version);
  }
  for (const SnapshotHeader::Mark& mark : header.marks) {
    writer.Write(mark.position);
    writer.Write(mark.length);
    if (version < 3 && mark.sliding_begin.empty()) writer.Write(mark.position);
    for (const auto& [window, begin] : mark.sliding_begin) writer.Write(begin);
    writer.Write(mark.previous);
  }
  for (const auto& [window, ranges] : header.sliding) {
    for (const SnapshotHeader::Range& range : ranges) {
      if (version >= 3) writer.Write(static_cast<uint64_t>(window));
      writer.Write(range.begin);
      writer.Write(range.end);
    }
  }
  for (const uint64_t position : header.states) writer.Write(position);
  writer.Write(HashBytes(writer.bytes()));
  return std::move(writer.bytes());
}

uint32_t ReadSnapshotVersion(ByteReader& reader) {
  const auto magic = reader.ReadBytes(sizeof(kSnapshotMagic), "magic");
  if (std::memcmp(magic.data(), kSnapshotMagic, magic.size()) != 0) {
    ThrowCorruptSnapshot(
        "offset 0: expected the magic 'GKVCACHE', found other bytes");
  }
  const uint32_t version = reader.Read<uint32_t>("version");
  if (version > kSnapshotVersion) {
    throw Mismatch(StrCat("snapshot: format version is ", version,
                          ", expected at most ", kSnapshotVersion,
                          " (a newer gemmakv wrote it)"));
  }
  Check("format version", version, 1, kSnapshotVersion);
  return version;
}

SnapshotHeader DecodeSnapshotHeader(std::span<const uint8_t> bytes,
                                    ByteReader& reader) {
  const uint32_t version = ReadSnapshotVersion(reader);
  SnapshotHeader header;
  const uint32_t dtype = reader.Read<uint32_t>("kv dtype");
  const uint64_t total = reader.Read<uint64_t>("total size");
  if (total != bytes.size()) {
    ThrowCorruptSnapshot(
        StrCat("expected ", total, " bytes, found ", bytes.size()));
  }
  header.fingerprint = reader.Read<Hash128>("fingerprint");
  SnapshotHeader::Range held1;
  if (version == 1) {
    held1 = ReadCounts1(reader, header);
  } else {
    header.capacity_tokens = reader.Read<uint64_t>("capacity");
    header.length = reader.Read<uint64_t>("length");
    header.computed = reader.Read<uint64_t>("computed length");
    header.checkpoint_bytes = reader.Read<uint64_t>("checkpoint bytes");
  }
  const uint32_t name_bytes = reader.Read<uint32_t>("name size");
  const uint32_t num_layers = reader.Read<uint32_t>("number of layers");
  uint32_t num_marks = 0, num_ranges = 0, num_states = 0;
  if (version > 1) {
    num_marks = reader.Read<uint32_t>("number of marks");
    num_ranges = reader.Read<uint32_t>("number of sliding ranges");
    num_states = reader.Read<uint32_t>("number of states");
  }
  Check("size of the model name", name_bytes, 0, kMaxNameBytes);
  const auto name = reader.ReadBytes(name_bytes, "model name");
  header.model_type.assign(name.begin(), name.end());
  for (uint32_t i = 0; i < num_layers; ++i) {
    header.layers.push_back(ReadSpec(reader, i, version));
  }
  const size_t num_windows = Windows(header.layers).size();
  if (version < 3) Check("number of windows", num_windows, 0, 1);
  ReadMarks(reader, version, num_marks, num_ranges, header);
  for (uint32_t i = 0; i < num_states; ++i) {
    header.states.push_back(reader.Read<uint64_t>("position of a state"));
  }
  if (version == 1) AddMark1(held1, header);
  const Hash128 expected = HashBytes(bytes.first(reader.offset()));
  if (reader.Read<Hash128>("header checksum") != expected) {
    ThrowCorruptSnapshot("the header does not match its checksum");
  }
  header.dtype = DecodeDtype(dtype);
  CheckHeader(header);
  return header;
}

uint64_t RangeBytes(const KvLayout& layout, size_t layer,
                    const SnapshotHeader::Range& range) {
  const KvLayerSpec& spec = layout.layers()[layer];
  return 2 * spec.kv_heads *
         KvStripBytes(layout.dtype(), range.tokens(), spec.head_dim);
}

// Terms are below 2^57 by the limits above and those of KvLayout. The sum stops
// when it exceeds every input.
uint64_t SnapshotPayloadBytes(const KvLayout& layout,
                              const SnapshotHeader& header) {
  constexpr uint64_t kAbsurd = uint64_t{1} << 60;
  uint64_t bytes = 0;
  for (size_t i = 0; i < layout.layers().size(); ++i) {
    const KvLayerSpec& spec = layout.layers()[i];
    if (spec.shares) continue;
    if (Recurs(spec)) {
      // A state is below 2^33 bytes, their number below 2^28.
      bytes += header.states.size() * layout.state_floats(i) * sizeof(float);
    }
    const KvGroup& group = layout.groups()[layout.group_of(i)];
    for (const SnapshotHeader::Range& range : header.ranges(group)) {
      bytes += RangeBytes(layout, i, range);
      if (bytes >= kAbsurd) return kAbsurd;
    }
    if (bytes >= kAbsurd) return kAbsurd;
  }
  return bytes;
}

}  // namespace gkv
