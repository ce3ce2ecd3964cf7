#ifndef GEMMAKV_CACHE_SNAPSHOT_FORMAT_H_
#define GEMMAKV_CACHE_SNAPSHOT_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/rounding.h"
#include "cache/kv_layout.h"
#include "io/byte_io.h"
#include "ops/kv_strip.h"

// The header of a snapshot, of every format version;
// docs/internals/snapshot-format.md describes the bytes.

namespace gkv {

inline constexpr char kSnapshotMagic[8] = {'G', 'K', 'V', 'C',
                                           'A', 'C', 'H', 'E'};
// The last version; all versions up to it are read. A snapshot that version 2
// can express is written as version 2.
inline constexpr uint32_t kSnapshotVersion = 3;

struct SnapshotHeader {
  // Positions that an attention group holds, stored as whole token groups.
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;

    uint64_t aligned_begin() const { return begin / kKvGroup * kKvGroup; }
    // The number of stored positions, a multiple of kKvGroup.
    uint64_t tokens() const { return RoundUp(end - aligned_begin(), kKvGroup); }
  };
  // What the groups that forget held when `position` was the next one to
  // compute. The first mark is the present, the others are checkpoints.
  struct Mark {
    uint64_t position = 0;
    uint64_t length = 0;    // tokens of the transcript at that time
    uint64_t previous = 0;  // earlier recurrent state; `position` if none
    // By window; `position` if its layers hold nothing.
    std::map<size_t, uint64_t> sliding_begin;
  };

  KvDtype dtype = KvDtype::kF32;
  Hash128 fingerprint;
  std::string model_type;
  uint64_t capacity_tokens = 0;
  std::optional<uint64_t> checkpoint_bytes;  // always set from version 2 on
  uint64_t length = 0;
  uint64_t computed = 0;
  std::vector<KvLayerSpec> layers;
  std::vector<Mark> marks;       // at least one
  std::map<size_t, std::vector<Range>> sliding;  // by window; ascending, apart
  std::vector<uint64_t> states;  // ascending positions, above 0

  // Returns the ranges of keys and values that layers of a group store.
  std::vector<Range> ranges(const KvGroup& group) const;
};

[[noreturn]] void ThrowCorruptSnapshot(const std::string& what);

// Returns the bytes of the header with their checksum. `total_bytes` is the
// size of the whole snapshot.
std::vector<uint8_t> EncodeSnapshotHeader(const SnapshotHeader& header,
                                          uint64_t total_bytes);

// Reads magic and version at the start of a snapshot. Throws CorruptFile if the
// bytes are none, Mismatch for a later version.
uint32_t ReadSnapshotVersion(ByteReader& reader);

// Reads the header at the start of a snapshot and checks its numbers against
// each other. Throws CorruptFile, or Mismatch for a later version.
SnapshotHeader DecodeSnapshotHeader(std::span<const uint8_t> bytes,
                                    ByteReader& reader);

// Returns the bytes of a layer's keys and values in a range: of the strips of
// all its heads.
uint64_t RangeBytes(const KvLayout& layout, size_t layer,
                    const SnapshotHeader::Range& range);

// Returns the bytes of keys, values and states that follow the token ids; 2^60
// or more if no snapshot can have as many.
uint64_t SnapshotPayloadBytes(const KvLayout& layout,
                              const SnapshotHeader& header);

}  // namespace gkv

#endif  // GEMMAKV_CACHE_SNAPSHOT_FORMAT_H_
