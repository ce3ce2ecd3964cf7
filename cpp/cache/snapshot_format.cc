#include "cache/snapshot_format.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

// Sizes that no sound snapshot exceeds; they keep every product far from
// overflow.
constexpr uint64_t kMaxTokens = uint64_t{1} << 28;
constexpr uint32_t kMaxNameBytes = 256;

void WriteHash(ByteWriter& writer, const Hash128& hash) {
  writer.Write(hash.low);
  writer.Write(hash.high);
}

void WriteSpec(ByteWriter& writer, const KvLayerSpec& spec) {
  const bool recurrent = spec.kind == LayerKind::kRecurrent;
  writer.Write(static_cast<uint32_t>(spec.kind));
  writer.Write(
      static_cast<uint32_t>(recurrent ? spec.lru_width : spec.kv_heads));
  writer.Write(
      static_cast<uint32_t>(recurrent ? spec.conv_tail : spec.head_dim));
  writer.Write(static_cast<uint32_t>(spec.window));
}

KvLayerSpec ReadSpec(ByteReader& reader, uint32_t layer, LayerKind last_kind) {
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
  return spec;
}

void Check(const char* what, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low || value > high) {
    ThrowCorruptSnapshot(
        StrCat(what, " is ", value, ", expected ", low, "..", high));
  }
}

KvDtype DecodeDtype(uint32_t id) {
  Check("kv dtype", id, 0, static_cast<uint32_t>(KvDtype::kInt8));
  return static_cast<KvDtype>(id);
}

bool Slides(const KvLayerSpec& spec) {
  return spec.kind == LayerKind::kSliding;
}

bool Recurs(const KvLayerSpec& spec) {
  return spec.kind == LayerKind::kRecurrent;
}

bool HasState(const SnapshotHeader& h, uint64_t position) {
  return std::binary_search(h.states.begin(), h.states.end(), position);
}

// What a mark refers to must be there.
void CheckMark(const SnapshotHeader& h, const SnapshotHeader::Mark& mark) {
  Check("position of a mark", mark.position, 0, h.computed);
  Check("length of a mark", mark.length, mark.position, h.length);
  Check("sliding begin of a mark", mark.sliding_begin, 0, mark.position);
  Check("previous state of a mark", mark.previous, 0, mark.position);
  const bool held =
      std::any_of(h.sliding.begin(), h.sliding.end(), [&](const auto& range) {
        return range.begin <= mark.sliding_begin && mark.position <= range.end;
      });
  if (mark.sliding_begin < mark.position && !held) {
    ThrowCorruptSnapshot(StrCat("positions ", mark.sliding_begin, "..",
                                mark.position,
                                " of sliding layers are not there"));
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

// The counts must fit together before anything is computed from them.
void CheckHeader(const SnapshotHeader& h) {
  Check("capacity", h.capacity_tokens, 1, kMaxTokens);
  Check("length", h.length, 0, h.capacity_tokens);
  Check("computed length", h.computed, 0, h.length);
  uint64_t last = 0;
  for (const SnapshotHeader::Range& range : h.sliding) {
    Check("sliding end", range.end, 1, h.computed);
    Check("sliding begin", range.begin, last, range.end - 1);
    last = range.end;
  }
  last = 0;
  for (const uint64_t position : h.states) {
    Check("position of a state", position, last + 1, h.computed);
    last = position;
  }
  const auto none = [&](auto kind) {
    return std::none_of(h.layers.begin(), h.layers.end(), kind);
  };
  if (!h.sliding.empty() && none(Slides)) {
    ThrowCorruptSnapshot("it holds a window, expected none: no layer slides");
  }
  if (!h.states.empty() && none(Recurs)) {
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

// The five counts of version 1, of which two say what sliding layers hold.
void ReadCounts1(ByteReader& reader, SnapshotHeader& header) {
  header.capacity_tokens = reader.Read<uint64_t>("capacity");
  header.length = reader.Read<uint64_t>("length");
  header.computed = reader.Read<uint64_t>("computed length");
  const uint64_t begin = reader.Read<uint64_t>("sliding begin");
  const uint64_t end = reader.Read<uint64_t>("sliding end");
  Check("sliding begin", begin, 0, end);
  if (begin < end) {
    header.sliding.push_back({begin, end});
    header.marks.push_back({end, header.length, begin, end});
  } else {
    Check("sliding end of an empty range", end, 0, 0);
    header.marks.push_back({0, header.length, 0, 0});
  }
}

void ReadMarks(ByteReader& reader, uint32_t count, SnapshotHeader& header) {
  for (uint32_t i = 0; i < count; ++i) {
    SnapshotHeader::Mark mark;
    mark.position = reader.Read<uint64_t>("position of a mark");
    mark.length = reader.Read<uint64_t>("length of a mark");
    mark.sliding_begin = reader.Read<uint64_t>("sliding begin of a mark");
    mark.previous = reader.Read<uint64_t>("previous state of a mark");
    header.marks.push_back(mark);
  }
}

}  // namespace

void ThrowCorruptSnapshot(const std::string& what) {
  throw CorruptFile("snapshot: " + what);
}

std::vector<SnapshotHeader::Range> SnapshotHeader::ranges(GroupId group) const {
  if (group == GroupId::kSliding) return sliding;
  if (group == GroupId::kFull && computed > 0) return {{0, computed}};
  return {};
}

Hash128 ReadHash(ByteReader& reader, const char* what) {
  Hash128 hash;
  hash.low = reader.Read<uint64_t>(what);
  hash.high = reader.Read<uint64_t>(what);
  return hash;
}

std::vector<uint8_t> EncodeSnapshotHeader(const SnapshotHeader& header,
                                          uint64_t total_bytes) {
  ByteWriter writer;
  writer.WriteBytes({reinterpret_cast<const uint8_t*>(kSnapshotMagic),
                     sizeof(kSnapshotMagic)});
  writer.Write(kSnapshotVersion);
  writer.Write(static_cast<uint32_t>(header.dtype));
  writer.Write(total_bytes);
  WriteHash(writer, header.fingerprint);
  writer.Write(header.capacity_tokens);
  writer.Write(header.length);
  writer.Write(header.computed);
  writer.Write(header.checkpoint_bytes.value_or(0));
  writer.Write(static_cast<uint32_t>(header.model_type.size()));
  writer.Write(static_cast<uint32_t>(header.layers.size()));
  writer.Write(static_cast<uint32_t>(header.marks.size()));
  writer.Write(static_cast<uint32_t>(header.sliding.size()));
  writer.Write(static_cast<uint32_t>(header.states.size()));
  writer.WriteBytes({reinterpret_cast<const uint8_t*>(header.model_type.data()),
                     header.model_type.size()});
  for (const KvLayerSpec& spec : header.layers) WriteSpec(writer, spec);
  for (const SnapshotHeader::Mark& mark : header.marks) {
    writer.Write(mark.position);
    writer.Write(mark.length);
    writer.Write(mark.sliding_begin);
    writer.Write(mark.previous);
  }
  for (const SnapshotHeader::Range& range : header.sliding) {
    writer.Write(range.begin);
    writer.Write(range.end);
  }
  for (const uint64_t position : header.states) writer.Write(position);
  WriteHash(writer, HashBytes(writer.bytes()));
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
  header.fingerprint = ReadHash(reader, "fingerprint");
  if (version == 1) {
    ReadCounts1(reader, header);
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
  const LayerKind last_kind =
      version == 1 ? LayerKind::kSliding : LayerKind::kRecurrent;
  for (uint32_t i = 0; i < num_layers; ++i) {
    header.layers.push_back(ReadSpec(reader, i, last_kind));
  }
  ReadMarks(reader, num_marks, header);
  for (uint32_t i = 0; i < num_ranges; ++i) {
    const uint64_t begin = reader.Read<uint64_t>("sliding begin");
    header.sliding.push_back({begin, reader.Read<uint64_t>("sliding end")});
  }
  for (uint32_t i = 0; i < num_states; ++i) {
    header.states.push_back(reader.Read<uint64_t>("position of a state"));
  }
  const Hash128 expected = HashBytes(bytes.first(reader.offset()));
  if (ReadHash(reader, "header checksum") != expected) {
    ThrowCorruptSnapshot("the header does not match its checksum");
  }
  header.dtype = DecodeDtype(dtype);
  CheckHeader(header);
  return header;
}

// Terms are below 2^57 by the limits above and those of KvLayout; sums that no
// input has bytes for stop there.
uint64_t SnapshotPayloadBytes(const KvLayout& layout,
                              const SnapshotHeader& header) {
  constexpr uint64_t kAbsurd = uint64_t{1} << 60;
  uint64_t bytes = 0;
  for (size_t i = 0; i < layout.layers().size(); ++i) {
    const KvLayerSpec& spec = layout.layers()[i];
    if (Recurs(spec)) {
      // A state is below 2^33 bytes, their number below 2^28.
      bytes += header.states.size() * layout.state_floats(i) * sizeof(float);
    }
    for (const SnapshotHeader::Range& range : header.ranges(layout.group(i))) {
      bytes += 2 * spec.kv_heads *
               KvStripBytes(layout.dtype(), range.tokens(), spec.head_dim);
      if (bytes >= kAbsurd) return kAbsurd;
    }
    if (bytes >= kAbsurd) return kAbsurd;
  }
  return bytes;
}

}  // namespace gkv
