#include "store/object.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/bytes.h"
#include "base/error.h"
#include "base/rounding.h"
#include "io/byte_io.h"

namespace gkv {
namespace {

constexpr char kMagic[8] = {'G', 'K', 'V', 'B', 'L', 'O', 'C', 'K'};
constexpr size_t kFixedBytes = 192;
constexpr size_t kPayloadHashAt = 160;
constexpr size_t kHeadHashAt = 176;
// No conversation has as many tokens.
constexpr uint64_t kMaxPosition = uint64_t{1} << 40;

// One block of the payload: positions [begin, end), or a state at `end`.
struct StoredBlock {
  size_t group;
  size_t begin, end;
  size_t offset;
};

std::shared_ptr<const KvLayout> StoredLayout(const KvLayout& layout) {
  return std::make_shared<KvLayout>(layout.layers(), layout.dtype(),
                                    kStoredBlockTokens);
}

void AddBlocks(size_t group, size_t begin, size_t end, size_t block_bytes,
               size_t& offset, std::vector<StoredBlock>& blocks) {
  while (begin < end) {
    const size_t next = (begin / kStoredBlockTokens + 1) * kStoredBlockTokens;
    blocks.push_back({group, begin, std::min(next, end), offset});
    offset += RoundUp(block_bytes, kAlignment);
    begin = next;
  }
}

// Returns the blocks of an object's payload; sets `bytes` to its size.
std::vector<StoredBlock> PayloadBlocks(const ObjectHead& head,
                                       const KvLayout& stored, size_t& bytes) {
  std::vector<StoredBlock> blocks;
  bytes = 0;
  for (const bool states : {false, true}) {
    for (size_t g = 0; g < stored.groups().size(); ++g) {
      const KvGroup& group = stored.groups()[g];
      if ((group.kind == LayerKind::kRecurrent) != states) continue;
      if (states) {
        if (head.kind != ObjectKind::kResume) continue;
        blocks.push_back({g, head.end, head.end, bytes});
        bytes += RoundUp(group.block_bytes, kAlignment);
        continue;
      }
      size_t begin = head.begin;
      if (head.kind == ObjectKind::kResume && group.window != 0) {
        const auto range = std::find_if(
            head.sliding.begin(), head.sliding.end(),
            [&](const SlidingRange& r) { return r.window == group.window; });
        assert(range != head.sliding.end());
        AddBlocks(g, range->from, range->own, group.block_bytes, bytes, blocks);
        begin = std::max<size_t>(begin, range->from);
      }
      if (head.kind == ObjectKind::kResume || group.window == head.window) {
        AddBlocks(g, begin, head.end, group.block_bytes, bytes, blocks);
      }
    }
  }
  return blocks;
}

size_t HeadBytes(const ObjectHead& head) {
  return RoundUp(kFixedBytes + head.tokens.size() * sizeof(int32_t) +
                     head.sliding.size() * 3 * sizeof(uint64_t),
                 kAlignment);
}

std::vector<uint8_t> EncodeHead(const ObjectHead& head, size_t payload_bytes,
                                const Hash128& payload_hash) {
  const size_t head_bytes = HeadBytes(head);
  ByteWriter out;
  out.WriteBytes(AsBytes(kMagic));
  out.Write(kBlockStoreVersion);
  out.Write(static_cast<uint32_t>(head.kind));
  out.Write(uint64_t{head_bytes + payload_bytes});
  out.Write(uint64_t{head_bytes});
  for (const Hash128& hash : {head.fingerprint, head.layout}) {
    out.Write(hash.low);
    out.Write(hash.high);
  }
  out.WriteBytes(head.salt.bytes);
  out.WriteBytes(head.parent.bytes);
  out.Write(head.begin);
  out.Write(head.end);
  out.Write(head.window);
  out.Write(static_cast<uint32_t>(head.sliding.size()));
  out.Write(uint32_t{0});  // media spans
  out.Write(payload_hash.low);
  out.Write(payload_hash.high);
  out.Write(uint64_t{0});  // the head's own hash
  out.Write(uint64_t{0});
  assert(out.size() == kFixedBytes);
  out.WriteBytes(AsBytes(head.tokens));
  for (const SlidingRange& range : head.sliding) {
    out.Write(range.window);
    out.Write(range.from);
    out.Write(range.own);
  }
  std::vector<uint8_t>& bytes = out.bytes();
  bytes.resize(head_bytes);
  const Hash128 hash = HashBytes(bytes);
  std::memcpy(&bytes[kHeadHashAt], &hash.low, sizeof(hash.low));
  std::memcpy(&bytes[kHeadHashAt + 8], &hash.high, sizeof(hash.high));
  return std::move(bytes);
}

[[noreturn]] void ThrowCorrupt(std::string_view what) {
  throw CorruptFile(StrCat("stored keys and values: ", what));
}

Hash128 ReadHash(ByteReader& reader, std::string_view what) {
  const auto low = reader.Read<uint64_t>(what);
  return {low, reader.Read<uint64_t>(what)};
}

Address ReadAddress(ByteReader& reader, std::string_view what) {
  Address address;
  const auto bytes = reader.ReadBytes(address.bytes.size(), what);
  std::copy(bytes.begin(), bytes.end(), address.bytes.begin());
  return address;
}

// Throws for positions with which lengths would differ from a writer's, with
// any layout.
void CheckPositions(const ObjectHead& head) {
  if (head.begin % kPageTokens != 0 || head.begin > kMaxPosition ||
      head.end < head.begin) {
    ThrowCorrupt(StrCat("positions ", head.begin, " to ", head.end,
                        ", expected those of one page"));
  }
  const size_t count = head.end - head.begin;
  const bool resume = head.kind == ObjectKind::kResume;
  if (resume ? count >= kPageTokens || head.end == 0 : count != kPageTokens) {
    ThrowCorrupt(StrCat(count, " tokens, expected those of one page"));
  }
  if (head.kind != ObjectKind::kWindowPage && head.window != 0) {
    ThrowCorrupt("a window that is none");
  }
}

void CheckWindows(const ObjectHead& head, const KvLayout& layout) {
  std::vector<uint64_t> windows;
  for (const KvGroup& group : layout.groups()) {
    if (group.window != 0) windows.push_back(group.window);
  }
  std::sort(windows.begin(), windows.end());
  if (head.kind == ObjectKind::kWindowPage &&
      std::find(windows.begin(), windows.end(), head.window) == windows.end()) {
    throw Mismatch(StrCat("stored keys and values of a window of ", head.window,
                          " tokens, expected one of the model's"));
  }
  if (head.kind != ObjectKind::kResume) windows.clear();
  if (head.sliding.size() != windows.size()) {
    ThrowCorrupt(StrCat(head.sliding.size(), " sliding ranges, expected ",
                        windows.size()));
  }
  for (size_t i = 0; i < windows.size(); ++i) {
    const SlidingRange& range = head.sliding[i];
    const uint64_t seen =
        head.end >= windows[i] ? head.end + 1 - windows[i] : 0;
    const bool in_tail = range.from >= head.begin;
    if (range.window != windows[i] || range.from > seen ||
        (range.own != range.from &&
         (in_tail || range.own != RoundUp(range.from, kPageTokens)))) {
      ThrowCorrupt(StrCat("a sliding range ", range.window, ", ", range.from,
                          ", ", range.own));
    }
  }
}

// Owns blocks in a mapping, and releases it with the last of them.
class MappedBlocks final : public BlockOwner {
 public:
  explicit MappedBlocks(std::shared_ptr<const void> mapping)
      : mapping_(std::move(mapping)) {}
  void Release(Block* block) noexcept override { delete block; }

 private:
  std::shared_ptr<const void> mapping_;
};

}  // namespace

SlidingRange SlidingRangeAt(size_t window, size_t held_begin,
                            size_t position) {
  const uint64_t tail = position / kPageTokens * kPageTokens;
  const uint64_t from = position >= window ? position + 1 - window : 0;
  assert(held_begin <= from);
  const uint64_t page = from / kPageTokens * kPageTokens;
  const bool whole = from >= tail || held_begin <= page;
  return {window, from, whole ? from : RoundUp(from, kPageTokens)};
}

bool ObjectHead::operator==(const ObjectHead& other) const {
  const auto key = [](const ObjectHead& h) {
    return std::tie(h.kind, h.fingerprint, h.layout, h.salt, h.parent, h.begin,
                    h.end, h.window, h.tokens);
  };
  return key(*this) == key(other);
}

StoredBytes EncodeObject(const ObjectHead& head, const KvLayout& layout,
                         const HeldSet& held) {
  const auto stored = StoredLayout(layout);
  size_t payload_bytes = 0;
  const auto blocks = PayloadBlocks(head, *stored, payload_bytes);
  const size_t head_bytes = HeadBytes(head);
  const auto buffer =
      std::make_shared<AlignedBuffer<uint8_t>>(head_bytes + payload_bytes);
  uint8_t* const payload = buffer->data() + head_bytes;
  std::memset(payload, 0, payload_bytes);
  for (const StoredBlock& block : blocks) {
    if (block.begin == block.end) {
      CopyState(layout, held[block.group].back().block.data(),
                payload + block.offset);
    } else {
      CopyPositions(layout, held[block.group], *stored, block.group,
                    block.begin, block.end, payload + block.offset);
    }
  }
  const std::vector<uint8_t> encoded =
      EncodeHead(head, payload_bytes, HashBytes({payload, payload_bytes}));
  std::memcpy(buffer->data(), encoded.data(), encoded.size());
  return {{buffer->data(), buffer->size()}, buffer, false};
}

namespace {

// Parses a head; sets `payload_hash` to the hash in it. Throws as ReadHead
// does.
ObjectHead ParseHead(std::span<const uint8_t> first, uint64_t object_bytes,
                     Hash128& payload_hash) {
  ByteReader reader(first);
  const auto magic = reader.ReadBytes(sizeof(kMagic), "magic");
  if (!std::equal(magic.begin(), magic.end(), std::begin(kMagic))) {
    ThrowCorrupt("no magic");
  }
  const auto version = reader.Read<uint32_t>("format version");
  if (version != kBlockStoreVersion) {
    throw Mismatch(StrCat("stored keys and values of format version ", version,
                          ", expected ", kBlockStoreVersion));
  }
  ObjectHead head;
  const auto kind = reader.Read<uint32_t>("kind");
  if (kind < 1 || kind > 3) ThrowCorrupt(StrCat("kind ", kind));
  head.kind = static_cast<ObjectKind>(kind);
  const auto size = reader.Read<uint64_t>("size");
  const auto payload_at = reader.Read<uint64_t>("offset of the payload");
  if (size != object_bytes) {
    ThrowCorrupt(StrCat(object_bytes, " bytes, expected ", size));
  }
  head.fingerprint = ReadHash(reader, "model fingerprint");
  head.layout = ReadHash(reader, "layout");
  head.salt = ReadAddress(reader, "salt");
  head.parent = ReadAddress(reader, "parent");
  head.begin = reader.Read<uint64_t>("begin");
  head.end = reader.Read<uint64_t>("end");
  head.window = reader.Read<uint64_t>("window");
  const auto ranges = reader.Read<uint32_t>("sliding ranges");
  if (reader.Read<uint32_t>("media spans") != 0) ThrowCorrupt("media spans");
  payload_hash = ReadHash(reader, "payload hash");
  const Hash128 head_hash = ReadHash(reader, "head hash");
  if (head.end - head.begin > kPageTokens) ThrowCorrupt("too many tokens");
  head.tokens.resize(head.end - head.begin);
  const auto tokens =
      reader.ReadBytes(head.tokens.size() * sizeof(int32_t), "token ids");
  if (!tokens.empty()) {
    std::memcpy(head.tokens.data(), tokens.data(), tokens.size());
  }
  if (ranges > reader.remaining() / (3 * sizeof(uint64_t))) {
    ThrowCorrupt("too many sliding ranges");
  }
  head.sliding.resize(ranges);
  for (SlidingRange& range : head.sliding) {
    range.window = reader.Read<uint64_t>("window");
    range.from = reader.Read<uint64_t>("from");
    range.own = reader.Read<uint64_t>("own");
  }
  CheckPositions(head);
  if (payload_at != HeadBytes(head) || payload_at > first.size()) {
    ThrowCorrupt("the payload is not where it should be");
  }
  const auto head_bytes = first.first(payload_at);
  std::vector<uint8_t> hashed(head_bytes.begin(), head_bytes.end());
  std::memset(&hashed[kHeadHashAt], 0, sizeof(Hash128));
  if (HashBytes(hashed) != head_hash) ThrowCorrupt("a wrong head hash");
  static_assert(kPayloadHashAt + sizeof(Hash128) == kHeadHashAt);
  return head;
}

}  // namespace

ObjectHead ReadHead(std::span<const uint8_t> object, bool check_payload) {
  Hash128 payload_hash;
  ObjectHead head = ParseHead(object, object.size(), payload_hash);
  if (check_payload &&
      HashBytes(object.subspan(HeadBytes(head))) != payload_hash) {
    ThrowCorrupt("a wrong payload hash");
  }
  return head;
}

ObjectHead ReadHeadOf(std::span<const uint8_t> first, uint64_t size) {
  Hash128 payload_hash;
  return ParseHead(first, size, payload_hash);
}

Address AddressOf(const ObjectHead& head) {
  switch (head.kind) {
    case ObjectKind::kPage:
      return PageAddress(head.parent, head.tokens);
    case ObjectKind::kWindowPage:
      return WindowAddress(head.parent, head.window);
    default:
      return ResumeAddress(head.parent, head.end, head.tokens);
  }
}

ObjectHead DecodeHead(std::span<const uint8_t> object, const KvLayout& layout,
                      bool check_payload) {
  ObjectHead head = ReadHead(object, check_payload);
  if (head.layout != layout.hash()) {
    throw Mismatch("stored keys and values of another layout");
  }
  CheckWindows(head, layout);
  size_t payload_bytes = 0;
  PayloadBlocks(head, *StoredLayout(layout), payload_bytes);
  const size_t found = object.size() - HeadBytes(head);
  if (payload_bytes != found) {
    ThrowCorrupt(StrCat(found, " bytes of keys and values, expected ",
                        payload_bytes));
  }
  return head;
}

HeldSet DecodeBlocks(const StoredBytes& object, const ObjectHead& head,
                     const KvLayout& layout, BlockPool& pool) {
  const auto stored = StoredLayout(layout);
  size_t payload_bytes = 0;
  const auto blocks = PayloadBlocks(head, *stored, payload_bytes);
  const uint8_t* const payload = object.bytes.data() + HeadBytes(head);
  const auto owner = std::make_shared<MappedBlocks>(object.owner);
  HeldSet held(layout.groups().size());
  for (const StoredBlock& part : blocks) {
    auto block = std::make_unique<Block>();
    // Never written: the block is marked as mapped.
    block->data = const_cast<uint8_t*>(payload + part.offset);
    block->size_bytes = stored->groups()[part.group].block_bytes;
    block->mapped = true;
    block->owner = owner;
    held[part.group].push_back(
        {part.begin, part.end, BlockRef(block.release())});
  }
  if (object.mapped && layout.block_tokens() == kStoredBlockTokens) return held;
  HeldSet copies;
  for (size_t g = 0; g < held.size(); ++g) {
    copies.push_back(CopyHeld(*stored, held[g], layout, g, pool));
  }
  return copies;
}

}  // namespace gkv
