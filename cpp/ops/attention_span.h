#ifndef GEMMAKV_OPS_ATTENTION_SPAN_H_
#define GEMMAKV_OPS_ATTENTION_SPAN_H_

#include <cstddef>
#include <cstdint>

#include "ops/attention.h"

// What the kernels of attention see of one span, and what they are.

namespace gkv {

inline constexpr size_t kSpanGroups = kAttentionSpan / kKvGroup;

// Where the keys and values of a span lie. Only the groups [group_begin,
// group_end) and their tokens are filled in. `next`, if not null, is the span
// that is read after this one; both are whole then. Its keys, and its values
// where the first queries all see those of this one, are fetched meanwhile by
// tiles of 4 queries or more; scales are not.
struct SpanAddresses {
  size_t group_begin;
  size_t group_end;
  const uint8_t* keys[kSpanGroups];           // [head_dim][16] of a group
  const float* key_scales[kSpanGroups];       // [head_dim / 32][16], int8 only
  const uint8_t* values[kAttentionSpan];      // [head_dim] of a token
  const float* value_scales[kAttentionSpan];  // [head_dim / 32], int8 only
  const SpanAddresses* next = nullptr;
};

// Visible tokens of one query, relative to the span.
struct TokenRange {
  size_t begin;
  size_t end;  // begin == end: sees nothing
};

// Takes a tile through one span; `ranges` is what each query sees of it.
using SpanKernel = void (*)(const SpanAddresses& addresses,
                            const QueryTile& tile, const TokenRange* ranges,
                            float* sums);

// The kernels of one kind of keys, values and weights, for the current target.
struct SpanKernels {
  SpanKernel partial;  // AttentionSpanPartial
  // Joins the span, which all queries see whole, with their states, none of
  // which is neutral: the same bits as a partial and a merge. Null where that
  // would not be faster.
  SpanKernel join = nullptr;
};

// AttentionTile by kernels of another kind than those of ops/attention.cc.
void AttentionTileBy(const SpanKernels& kernels, const KvHeadView& kv,
                     const QueryTile& tile, float* scratch, float* const* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_ATTENTION_SPAN_H_
