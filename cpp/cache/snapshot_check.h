#ifndef GEMMAKV_CACHE_SNAPSHOT_CHECK_H_
#define GEMMAKV_CACHE_SNAPSHOT_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gkv {

// One part of a snapshot, including its checksum.
struct SnapshotSection {
  std::string name;  // "header", "token ids", "keys and values", "content"
  size_t offset;
  size_t size_bytes;
  std::string problem;  // one line; empty if it is sound
};

struct SnapshotCheck {
  uint32_t version = 0;
  std::vector<SnapshotSection> sections;
};

// Checks a snapshot section by section, and goes on after a bad one: if the
// header is sound, every checksum is checked. The last entry, "content", says
// whether the whole restores; it has no bytes of its own, and is there if all
// others are sound. Throws CorruptFile if the bytes are no snapshot, Mismatch
// for a later version. Never reads outside `bytes`.
SnapshotCheck CheckSnapshot(std::span<const uint8_t> bytes);

}  // namespace gkv

#endif  // GEMMAKV_CACHE_SNAPSHOT_CHECK_H_
