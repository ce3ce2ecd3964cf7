#ifndef GEMMAKV_CACHE_SNAPSHOT_PAYLOAD_H_
#define GEMMAKV_CACHE_SNAPSHOT_PAYLOAD_H_

#include <algorithm>
#include <cstddef>

#include "cache/kv_layout.h"
#include "cache/snapshot_format.h"
#include "ops/kv_strip.h"

// The order of keys, values and states in a snapshot, for both directions.
//
// What checkpoints and the present hold overlaps, and where it does it is the
// same: keys, values and states follow from the tokens before them. So a
// snapshot stores every position once, and a restored cache shares one block
// between all that hold a part of it.

namespace gkv {

inline constexpr size_t kSnapshotSealBytes = sizeof(Hash128);

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
    if (spec.shares) continue;
    const KvGroup& group = layout.groups()[layout.group_of(layer)];
    for (const SnapshotHeader::Range& range : header.ranges(group)) {
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
      if (layout.layers()[layer].kind != LayerKind::kRecurrent) continue;
      fn(i, layer, payload);
      payload += layout.state_floats(layer) * sizeof(float);
    }
  }
}

}  // namespace gkv

#endif  // GEMMAKV_CACHE_SNAPSHOT_PAYLOAD_H_
