#ifndef GEMMAKV_OPS_ATTENTION_H_
#define GEMMAKV_OPS_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "gemmakv/kv_dtype.h"
#include "ops/kv_strip.h"

// Attention over stored keys and values.
//
// Positions are cut into spans at absolute multiples of kAttentionSpan. Of each
// span that a query sees there is a partial result (max, sum, accumulator) in
// f32, and partials are merged into the query's state in ascending order of the
// spans. So the result is a function of the query, and of the visible keys and
// values at their absolute positions, alone: neither the storage block size,
// nor how queries are grouped into tiles, nor which thread computes which span
// changes a bit. AttentionTile() does all of this for some queries; the pieces
// AttentionSpanPartial(), AttentionMerge() and AttentionFinish() are for tasks
// that share the spans of one tile.

namespace gkv {

inline constexpr size_t kAttentionSpan = 128;

// Queries in one tile: rows x the query heads that share one kv head.
inline constexpr size_t kMaxTileQueries = 16;

// Queries that AttentionTile takes: several tiles, which read a span's keys and
// values one after the other, while these are in a near cache.
inline constexpr size_t kMaxBlockQueries = 32;
inline constexpr size_t kMaxHeadDim = 512;

// Keys and values of one kv head of one layer of one conversation. Block i of
// `blocks` holds positions [(first_block + i) * block_tokens, ... +
// block_tokens); within it the key strip starts at key_offset and the value
// strip at value_offset.
struct KvHeadView {
  const uint8_t* const* blocks;
  size_t first_block;
  size_t block_tokens;  // power of two, 16..128
  size_t key_offset;
  size_t value_offset;
  KvDtype dtype;
};

// Query i sees positions [begin[i], end[i]), begin[i] < end[i]; every visible
// position lies in a block of the view. Queries are scaled and rotated.
struct QueryTile {
  const float* const* q;  // [num_queries] pointers to [head_dim]
  const size_t* begin;    // [num_queries]
  const size_t* end;      // [num_queries]
  size_t num_queries;     // 1..kMaxTileQueries, or where it says so more
  size_t head_dim;        // multiple of 32, at most kMaxHeadDim
  float soft_cap;         // 0: none; else scores become cap * tanh(s / cap)
};

// Floats that one query's partial result takes: head_dim accumulators, then
// the maximum and the sum.
constexpr size_t PartialFloats(size_t head_dim) { return head_dim + 16; }

// The partial of span `span` (positions [span * kAttentionSpan, ...)) for every
// query: partial [num_queries, PartialFloats(head_dim)]. A query that sees
// nothing of the span gets the neutral partial (maximum -inf, sum 0).
// Positions that a query does not see are never allowed to influence its
// result, whatever bytes (NaN included) are stored there.
void AttentionSpanPartial(const KvHeadView& kv, const QueryTile& tile,
                          size_t span, float* partial);

// state = state joined with the partial of the next span. A neutral partial
// leaves state unchanged bit for bit, and a neutral state becomes the partial.
void AttentionMerge(const float* partial, size_t head_dim, float* state);

// out [head_dim] = accumulator / sum. Requires: not neutral.
void AttentionFinish(const float* state, size_t head_dim, float* out);

// Floats that AttentionTile works in. More than the stack of a small thread
// holds.
constexpr size_t AttentionTileFloats(size_t num_queries, size_t head_dim) {
  return (num_queries + kMaxTileQueries) * PartialFloats(head_dim);
}

// All of the above for up to kMaxBlockQueries queries: spans in ascending
// order, then out[i] [head_dim] for query i. Same bits as the pieces. The view
// has all blocks from the first to the last position that any query sees: the
// next span is fetched while one is read. `scratch` [AttentionTileFloats] is
// used meanwhile.
void AttentionTile(const KvHeadView& kv, const QueryTile& tile, float* scratch,
                   float* const* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_ATTENTION_H_
