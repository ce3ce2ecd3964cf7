#ifndef GEMMAKV_CACHE_KV_COPY_H_
#define GEMMAKV_CACHE_KV_COPY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "cache/group_cache.h"
#include "cache/kv_layout.h"
#include "ops/kv_strip.h"

// How what is held of positions [begin, end) goes from place to place: from
// blocks to blocks of another size, to snapshots, to objects of the store, and
// back. All of these hold it as strips (ops/kv_strip.h), which lie together by
// layer: for each of its heads the keys, then the values. They differ in the
// positions of a strip: a block and an object have `block_tokens` of them, a
// snapshot has all of a range of its header. No copy touches a byte of other
// positions: another thread may be writing those.

namespace gkv {

// The blocks that hold some positions, parallel to KvLayout::groups().
using HeldSet = std::vector<std::vector<HeldBlock>>;

// Strips of one layer, or one of these strips: each has `tokens` tokens, the
// first of which is of position `first`.
template <typename Byte>
struct KvStrips {
  Byte* data;
  size_t first;
  size_t tokens;
};

// Those of a layer in a block, of which `position` is one.
template <typename Byte>
KvStrips<Byte> StripsIn(const KvLayout& layout, size_t layer, Byte* block,
                        size_t position) {
  const size_t tokens = layout.block_tokens();
  return {block + layout.key_offset(layer, 0), position / tokens * tokens,
          tokens};
}

// Copies positions [begin, end) of the keys or the values of one head.
void CopyStrip(const KvLayout& layout, size_t layer, bool values, size_t begin,
               size_t end, const KvStrips<const uint8_t>& from,
               const KvStrips<uint8_t>& to);

// Copies positions [begin, end) of all strips of a layer.
void CopyLayer(const KvLayout& layout, size_t layer, size_t begin, size_t end,
               KvStrips<const uint8_t> from, KvStrips<uint8_t> to);

// Copies positions [begin, end), as far as `held` has them, to a block of `to`
// that covers them. Requires: an attention group of both layouts, which differ
// in block_tokens at most.
void CopyPositions(const KvLayout& from, std::span<const HeldBlock> held,
                   const KvLayout& to, size_t group, size_t begin, size_t end,
                   uint8_t* block);

// Copies what a block of the recurrent group holds.
void CopyState(const KvLayout& layout, const uint8_t* from, uint8_t* to);

// The same positions in blocks of `to`'s size from `pool`. Throws CacheFull.
std::vector<HeldBlock> CopyHeld(const KvLayout& from,
                                std::span<const HeldBlock> held,
                                const KvLayout& to, size_t group,
                                BlockPool& pool);

// Calls fn(offset, bytes) for the states of the layers in a block of the
// recurrent group, in the order of the layers.
template <typename Fn>
void ForStates(const KvLayout& layout, const Fn& fn) {
  for (size_t layer = 0; layer < layout.layers().size(); ++layer) {
    if (layout.layers()[layer].kind != LayerKind::kRecurrent) continue;
    fn(layout.state_offset(layer), layout.state_floats(layer) * sizeof(float));
  }
}

}  // namespace gkv

#endif  // GEMMAKV_CACHE_KV_COPY_H_
