#include "cache/snapshot.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "io/byte_io.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

// Sizes that no sound snapshot exceeds; they keep every product below far from
// overflow.
constexpr uint64_t kMaxTokens = uint64_t{1} << 28;
constexpr uint32_t kMaxNameBytes = 256;
constexpr size_t kChecksumBytes = sizeof(Hash128);

// The positions of one group that a snapshot holds: whole token groups around
// [begin, end).
struct Range {
  size_t begin = 0;
  size_t end = 0;

  size_t aligned_begin() const { return begin / kKvGroup * kKvGroup; }
  size_t tokens() const {  // stored ones, a multiple of kKvGroup
    return (end - aligned_begin() + kKvGroup - 1) / kKvGroup * kKvGroup;
  }
};

struct Header {
  KvDtype dtype;
  Hash128 fingerprint;
  std::string model_type;
  uint64_t capacity_tokens;
  uint64_t length;
  uint64_t computed;
  uint64_t sliding_begin;
  uint64_t sliding_end;
  std::vector<KvLayerSpec> layers;

  Range range(GroupId group) const {
    return group == GroupId::kFull ? Range{0, computed}
                                   : Range{sliding_begin, sliding_end};
  }
};

// A layer's term is below 2^57 by the limits above and those of KvLayout; sums
// past kAbsurd, which no input has bytes for, stop there.
uint64_t PayloadBytes(const KvLayout& layout, const Header& header) {
  constexpr uint64_t kAbsurd = uint64_t{1} << 60;
  uint64_t bytes = 0;
  for (size_t i = 0; i < layout.layers().size() && bytes < kAbsurd; ++i) {
    const KvLayerSpec& spec = layout.layers()[i];
    bytes +=
        2 * spec.kv_heads *
        KvStripBytes(layout.dtype(), header.range(layout.group(i)).tokens(),
                     spec.head_dim);
  }
  return bytes;
}

void WriteHash(ByteWriter& writer, const Hash128& hash) {
  writer.Write(hash.low);
  writer.Write(hash.high);
}

Hash128 ReadHash(ByteReader& reader, const char* what) {
  Hash128 hash;
  hash.low = reader.Read<uint64_t>(what);
  hash.high = reader.Read<uint64_t>(what);
  return hash;
}

// Everything before the token ids. `total_bytes` is of the whole snapshot.
std::vector<uint8_t> EncodeHeader(const Header& header, uint64_t total_bytes) {
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
  writer.Write(header.sliding_begin);
  writer.Write(header.sliding_end);
  writer.Write(static_cast<uint32_t>(header.model_type.size()));
  writer.Write(static_cast<uint32_t>(header.layers.size()));
  writer.WriteBytes({reinterpret_cast<const uint8_t*>(header.model_type.data()),
                     header.model_type.size()});
  for (const KvLayerSpec& spec : header.layers) {
    writer.Write(static_cast<uint32_t>(spec.kind));
    writer.Write(static_cast<uint32_t>(spec.kv_heads));
    writer.Write(static_cast<uint32_t>(spec.head_dim));
    writer.Write(static_cast<uint32_t>(spec.window));
  }
  WriteHash(writer, HashBytes(writer.bytes()));
  return std::move(writer.bytes());
}

[[noreturn]] void Corrupt(const std::string& what) {
  throw CorruptFile("snapshot: " + what);
}

KvDtype DecodeDtype(uint32_t id) {
  if (id > static_cast<uint32_t>(KvDtype::kInt8)) {
    Corrupt(StrCat("kv dtype is ", id, ", expected 0..2"));
  }
  return static_cast<KvDtype>(id);
}

Header DecodeHeader(std::span<const uint8_t> bytes, ByteReader& reader) {
  const auto magic = reader.ReadBytes(sizeof(kSnapshotMagic), "magic");
  if (std::memcmp(magic.data(), kSnapshotMagic, magic.size()) != 0) {
    Corrupt("offset 0: expected the magic 'GKVCACHE', found other bytes");
  }
  const uint32_t version = reader.Read<uint32_t>("version");
  if (version > kSnapshotVersion) {
    throw Mismatch(StrCat("snapshot: format version is ", version,
                          ", expected at most ", kSnapshotVersion,
                          " (a newer gemmakv wrote it)"));
  }
  if (version != kSnapshotVersion) {
    Corrupt(
        StrCat("format version is ", version, ", expected ", kSnapshotVersion));
  }
  Header header;
  const uint32_t dtype = reader.Read<uint32_t>("kv dtype");
  const uint64_t total = reader.Read<uint64_t>("total size");
  if (total != bytes.size()) {
    Corrupt(StrCat("expected ", total, " bytes, found ", bytes.size()));
  }
  header.fingerprint = ReadHash(reader, "fingerprint");
  header.capacity_tokens = reader.Read<uint64_t>("capacity");
  header.length = reader.Read<uint64_t>("length");
  header.computed = reader.Read<uint64_t>("computed length");
  header.sliding_begin = reader.Read<uint64_t>("sliding begin");
  header.sliding_end = reader.Read<uint64_t>("sliding end");
  const uint32_t name_bytes = reader.Read<uint32_t>("name size");
  const uint32_t num_layers = reader.Read<uint32_t>("number of layers");
  if (name_bytes > kMaxNameBytes) {
    Corrupt(StrCat("model name has ", name_bytes, " bytes, expected at most ",
                   kMaxNameBytes));
  }
  const auto name = reader.ReadBytes(name_bytes, "model name");
  header.model_type.assign(name.begin(), name.end());
  for (uint32_t i = 0; i < num_layers; ++i) {
    const auto kind = reader.Read<uint32_t>("layer kind");
    if (kind > static_cast<uint32_t>(LayerKind::kSliding)) {
      Corrupt(StrCat("layer ", i, ": kind is ", kind, ", expected 0 or 1"));
    }
    KvLayerSpec spec;
    spec.kind = static_cast<LayerKind>(kind);
    spec.kv_heads = reader.Read<uint32_t>("kv_heads");
    spec.head_dim = reader.Read<uint32_t>("head_dim");
    spec.window = reader.Read<uint32_t>("window");
    header.layers.push_back(spec);
  }
  const Hash128 computed = HashBytes(bytes.first(reader.offset()));
  if (ReadHash(reader, "header checksum") != computed) {
    Corrupt("the header does not match its checksum");
  }
  header.dtype = DecodeDtype(dtype);
  return header;
}

// The counts must fit together before anything is computed from them.
void CheckHeader(const Header& h) {
  const auto check = [](const char* what, uint64_t value, uint64_t low,
                        uint64_t high) {
    if (value < low || value > high) {
      Corrupt(StrCat(what, " is ", value, ", expected ", low, "..", high));
    }
  };
  check("capacity", h.capacity_tokens, 1, kMaxTokens);
  check("length", h.length, 0, h.capacity_tokens);
  check("computed length", h.computed, 0, h.length);
  check("sliding end", h.sliding_end, 0, h.computed);
  check("sliding begin", h.sliding_begin, 0, h.sliding_end);
  if (h.sliding_begin == h.sliding_end) {
    check("sliding end of an empty range", h.sliding_end, 0, 0);
  }
}

// One token group of one kv head: where it lies in the payload and in which
// block of its group's table. `copy` describes the way from payload to block.
template <typename Byte>
struct PlaceOf {
  size_t layer;
  size_t head;
  size_t block;
  Byte* keys;  // strips of the payload
  Byte* values;
  GroupCopy copy;
};
using GroupPlace = PlaceOf<uint8_t>;

// Calls fn for every token group in the payload, in order.
template <typename Byte, typename Fn>
void ForGroups(const KvLayout& layout, const Header& header, Byte* payload,
               const Fn& fn) {
  const size_t block_tokens = layout.block_tokens();
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    const KvLayerSpec& spec = layout.layers()[layer];
    const Range range = header.range(layout.group(layer));
    const size_t strip_bytes =
        KvStripBytes(layout.dtype(), range.tokens(), spec.head_dim);
    for (size_t head = 0; head < spec.kv_heads; ++head) {
      for (size_t p = range.aligned_begin(); p < range.end; p += kKvGroup) {
        GroupCopy copy;
        copy.dtype = layout.dtype();
        copy.head_dim = spec.head_dim;
        copy.first = std::max(p, range.begin) - p;
        copy.last = std::min(p + kKvGroup, range.end) - p;
        copy.from_tokens = range.tokens();
        copy.from_group = (p - range.aligned_begin()) / kKvGroup;
        copy.to_tokens = block_tokens;
        copy.to_group = p % block_tokens / kKvGroup;
        fn(PlaceOf<Byte>{layer, head, p / block_tokens, payload,
                         payload + strip_bytes, copy});
      }
      payload += 2 * strip_bytes;
    }
  }
}

void CheckSeal(ByteReader& reader, std::span<const uint8_t> bytes,
               const char* what) {
  if (ReadHash(reader, what) != HashBytes(bytes)) {
    Corrupt(StrCat("the ", what, " do not match their checksum"));
  }
}

}  // namespace

std::vector<uint8_t> SnapshotEncoder::Encode(const KVCache& cache) {
  const KvLayout& layout = cache.layout();
  const KVCache::State& state = cache.state_;
  const bool has_sliding =
      layout.has_group(GroupId::kSliding) && state.replay_target == 0;
  const Header header{layout.dtype(),
                      state.fingerprint,
                      cache.model_type(),
                      cache.capacity_tokens(),
                      state.log.size(),
                      state.computed,
                      has_sliding ? state.sliding_begin : 0,
                      has_sliding ? state.sliding_end : 0,
                      layout.layers()};
  const uint64_t token_bytes = state.log.size() * sizeof(int32_t);
  const uint64_t payload = PayloadBytes(layout, header);
  const uint64_t header_bytes = EncodeHeader(header, 0).size();
  const uint64_t total =
      header_bytes + token_bytes + payload + 2 * kChecksumBytes;

  std::vector<uint8_t> out = EncodeHeader(header, total);
  out.resize(total);
  uint8_t* at = out.data() + header_bytes;
  const auto seal = [&](size_t size) {
    const Hash128 hash = HashBytes({at, size});
    at += size;
    std::memcpy(at, &hash.low, sizeof(hash.low));
    std::memcpy(at + sizeof(hash.low), &hash.high, sizeof(hash.high));
    at += kChecksumBytes;
  };

  std::vector<int32_t> tokens(state.log.size());
  state.log.Copy(0, tokens);
  if (!tokens.empty()) std::memcpy(at, tokens.data(), token_bytes);
  seal(token_bytes);

  // Strips start as zeros, and only positions that are held are copied in:
  // bytes of others never leave the process.
  ForGroups(layout, header, at, [&](const GroupPlace& place) {
    const KVCache::Group& group =
        state.groups[static_cast<size_t>(layout.group(place.layer))];
    const uint8_t* block = group.blocks[place.block - group.first_block].data();
    GroupCopy copy = place.copy;
    std::swap(copy.from_tokens, copy.to_tokens);
    std::swap(copy.from_group, copy.to_group);
    CopyKeyGroup(copy, block + layout.key_offset(place.layer, place.head),
                 place.keys);
    CopyValueGroup(copy, block + layout.value_offset(place.layer, place.head),
                   place.values);
  });
  seal(payload);
  return out;
}

std::unique_ptr<KVCache> SnapshotDecoder::Decode(std::span<const uint8_t> bytes,
                                                 const CacheOptions& options) {
  ByteReader reader(bytes);
  const Header header = DecodeHeader(bytes, reader);
  CheckHeader(header);
  std::shared_ptr<const KvLayout> layout;
  try {
    layout = std::make_shared<KvLayout>(header.layers, header.dtype,
                                        options.block_tokens);
  } catch (const InvalidArgument& error) {
    Corrupt(error.what());
  }
  if (!layout->has_group(GroupId::kSliding) && header.sliding_end != 0) {
    Corrupt(StrCat("sliding end is ", header.sliding_end,
                   ", expected 0: no layer slides"));
  }
  const uint64_t token_bytes = header.length * sizeof(int32_t);
  const auto token_span = reader.ReadBytes(token_bytes, "token ids");
  CheckSeal(reader, token_span, "token ids");
  const auto payload =
      reader.ReadBytes(PayloadBytes(*layout, header), "keys and values");
  CheckSeal(reader, payload, "keys and values");
  if (reader.remaining() != 0) {
    Corrupt(StrCat(reader.remaining(), " bytes follow the end"));
  }
  std::vector<int32_t> tokens(header.length);
  if (!tokens.empty()) {
    std::memcpy(tokens.data(), token_span.data(), token_bytes);
  }
  for (const int32_t token : tokens) {
    if (token < 0) Corrupt(StrCat("token id ", token, " is negative"));
  }

  CacheOptions full = options;
  if (full.capacity_tokens == 0) full.capacity_tokens = header.capacity_tokens;
  if (full.capacity_tokens < header.length) {
    throw OutOfBlocks(StrCat("the snapshot holds ", header.length,
                             " tokens, expected at most the capacity of ",
                             full.capacity_tokens));
  }
  auto cache = std::make_unique<KVCache>(layout, full, header.model_type);
  KVCache::State& state = cache->state_;
  state.log.Append(tokens);
  state.computed = header.computed;
  state.fingerprint = header.fingerprint;
  state.sliding_begin = header.sliding_begin;
  state.sliding_end = header.sliding_end;
  for (const GroupId id : {GroupId::kFull, GroupId::kSliding}) {
    if (!layout->has_group(id)) continue;
    const Range range = header.range(id);
    if (range.begin == range.end) continue;
    KVCache::Group& group = state.groups[static_cast<size_t>(id)];
    group.first_block = range.begin / layout->block_tokens();
    const size_t end = (range.end - 1) / layout->block_tokens() + 1;
    for (size_t block = group.first_block; block < end; ++block) {
      group.blocks.push_back(cache->pool_->Acquire(layout->block_bytes(id)));
    }
  }
  ForGroups(
      *layout, header, payload.data(),
      [&](const PlaceOf<const uint8_t>& place) {
        const KVCache::Group& group =
            state.groups[static_cast<size_t>(layout->group(place.layer))];
        uint8_t* block = group.blocks[place.block - group.first_block].data();
        CopyKeyGroup(place.copy, place.keys,
                     block + layout->key_offset(place.layer, place.head));
        CopyValueGroup(place.copy, place.values,
                       block + layout->value_offset(place.layer, place.head));
      });
  return cache;
}

}  // namespace gkv
