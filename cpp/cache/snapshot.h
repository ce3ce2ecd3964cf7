#ifndef GEMMAKV_CACHE_SNAPSHOT_H_
#define GEMMAKV_CACHE_SNAPSHOT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "cache/conversation.h"
#include "cache/snapshot_format.h"
#include "io/byte_io.h"

// Writes a conversation as bytes; docs/internals/snapshot-format.md describes
// every field.
//
// The content of checkpoints and of the present overlaps, and is equal where it
// does: keys, values and states follow from the tokens before them. So a
// snapshot stores every position once, and a restored cache shares one block
// between all that hold a part of it.

namespace gkv {

class SnapshotWriter {
 public:
  // Writes what `cache` holds now, to which it refers.
  SnapshotWriter(const Conversation& cache, bool checkpoints);

  uint64_t size_bytes() const { return size_bytes_; }
  // Gives all bytes to `sink`, in pieces of about 256 KiB that are made one at
  // a time.
  void Write(const ByteSink& sink) const;

 private:
  class Sections;

  void AddMark(const GroupSet& groups, size_t position, size_t length);
  void CompleteHeader();
  void WriteStrip(size_t layer, size_t head, const SnapshotHeader::Range& range,
                  bool values, Sections& out) const;
  void CopyTokens(size_t layer, size_t head, bool values, size_t begin,
                  size_t end, uint8_t* strip, size_t strip_tokens) const;

  std::shared_ptr<const KvLayout> layout_;
  KvContent content_;
  SnapshotHeader header_;
  uint64_t size_bytes_;
  // The content to store, by group and index of the block, or position of the
  // state.
  std::vector<std::map<size_t, std::vector<HeldBlock>>> held_;
};

// Calls fn(layer, range) for the keys and values in a payload, in their order:
// each time the strips of all heads of the layer, of range.tokens() tokens
// each.
template <typename Fn>
void ForRanges(const KvLayout& layout, const SnapshotHeader& header,
               const Fn& fn) {
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    if (layout.layers()[layer].shares) continue;
    const KvGroup& group = layout.groups()[layout.group_of(layer)];
    for (const SnapshotHeader::Range& range : header.ranges(group)) {
      fn(layer, range);
    }
  }
}

}  // namespace gkv

#endif  // GEMMAKV_CACHE_SNAPSHOT_H_
