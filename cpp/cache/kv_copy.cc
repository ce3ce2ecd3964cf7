#include "cache/kv_copy.h"

#include <algorithm>
#include <cstring>

namespace gkv {

void CopyStrip(const KvLayout& layout, size_t layer, bool values, size_t begin,
               size_t end, const KvStrips<const uint8_t>& from,
               const KvStrips<uint8_t>& to) {
  const StripCopy copy = {.dtype = layout.dtype(),
                          .head_dim = layout.layers()[layer].head_dim,
                          .begin = begin - from.first,
                          .end = end - from.first,
                          .to_begin = begin - to.first,
                          .from_tokens = from.tokens,
                          .to_tokens = to.tokens};
  (values ? CopyValues : CopyKeys)(copy, from.data, to.data);
}

void CopyLayer(const KvLayout& layout, size_t layer, size_t begin, size_t end,
               KvStrips<const uint8_t> from, KvStrips<uint8_t> to) {
  const KvLayerSpec& spec = layout.layers()[layer];
  for (size_t i = 0; i < 2 * spec.kv_heads; ++i) {
    CopyStrip(layout, layer, i % 2 == 1, begin, end, from, to);
    from.data += KvStripBytes(layout.dtype(), from.tokens, spec.head_dim);
    to.data += KvStripBytes(layout.dtype(), to.tokens, spec.head_dim);
  }
}

void CopyPositions(const KvLayout& from, std::span<const HeldBlock> held,
                   const KvLayout& to, size_t group, size_t begin, size_t end,
                   uint8_t* block) {
  for (const HeldBlock& part : held) {
    const size_t p = std::max(part.begin, begin);
    const size_t last = std::min(part.end, end);
    if (p >= last) continue;
    const uint8_t* const source = part.block.data();
    for (const size_t layer : from.groups()[group].layers) {
      CopyLayer(from, layer, p, last, StripsIn(from, layer, source, p),
                StripsIn(to, layer, block, p));
    }
  }
}

void CopyState(const KvLayout& layout, const uint8_t* from, uint8_t* to) {
  ForStates(layout, [&](size_t offset, size_t bytes) {
    std::memcpy(to + offset, from + offset, bytes);
  });
}

std::vector<HeldBlock> CopyHeld(const KvLayout& from,
                                std::span<const HeldBlock> held,
                                const KvLayout& to, size_t group,
                                BlockPool& pool) {
  std::vector<HeldBlock> copies;
  const size_t bytes = to.groups()[group].block_bytes;
  if (to.groups()[group].kind == LayerKind::kRecurrent) {
    for (const HeldBlock& state : held) {
      copies.push_back({state.begin, state.end, pool.Acquire(bytes)});
      CopyState(to, state.block.data(), copies.back().block.data());
    }
    return copies;
  }
  for (size_t i = 0; i < held.size();) {
    // The number of parts that follow each other without a gap.
    size_t count = 1;
    while (i + count < held.size() &&
           held[i + count].begin == held[i + count - 1].end) {
      ++count;
    }
    const auto run = held.subspan(i, count);
    to.ForBlocks(run.front().begin, run.back().end,
                 [&](size_t, size_t begin, size_t end) {
                   copies.push_back({begin, end, pool.Acquire(bytes)});
                   CopyPositions(from, run, to, group, begin, end,
                                 copies.back().block.data());
                 });
    i += count;
  }
  return copies;
}

}  // namespace gkv
