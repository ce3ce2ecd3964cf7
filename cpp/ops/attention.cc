#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "base/fp_environment.h"
#include "base/rounding.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/attention-inl.h"
#include "ops/attention_bf16-inl.h"
#include "ops/attention_span.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

#if GKV_NATIVE_PAIRS

// Whether the instruction does what is expected of it, tried on numbers of all
// magnitudes: what is written of it leaves a processor some freedom.
bool TryPairs() {
  const ScopedFpEnvironment fp_environment;
  uint64_t state = 1;
  for (size_t n = 0; n < 4096; ++n) {
    // Exponents around one another, of all sizes, and close to the least.
    const uint32_t spread = n % 3 == 0 ? 12 : n % 3 == 1 ? 250 : 60;
    const uint32_t least = n % 3 == 0 ? 120 : 0;
    const auto next = [&] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto bits = static_cast<uint32_t>(state >> 32);
      return (bits & 0x807FFFFFu) | (least + (bits >> 23) % spread) << 23;
    };
    uint16_t rows[2][kLanes];
    HWY_ALIGN float weights[1][kAttentionSpan] = {};
    float native[kLanes], expected[kLanes];
    SpanAddresses addresses;
    for (size_t i = 0; i < 2; ++i) {
      for (uint16_t& x : rows[i]) x = static_cast<uint16_t>(next() >> 16);
      weights[0][i] = hwy::BitCastScalar<float>(next() & 0xFFFF0000u);
      addresses.values[i] = reinterpret_cast<const uint8_t*>(rows[i]);
    }
    for (size_t i = 0; i < kLanes; ++i) {
      native[i] = expected[i] = hwy::BitCastScalar<float>(next());
    }
    const TokenRange range = {0, 2};
    const ValueTask task = {addresses, 1, &range, weights, kLanes};
    SumPairs<PartialSums>(task, {native, 0});
    SumRounded(task, {expected, 0});
    if (std::memcmp(native, expected, sizeof(native)) != 0) return false;
  }
  return true;
}

bool UsePairs() {
  static const bool use = TryPairs();
  return use;
}

#endif  // GKV_NATIVE_PAIRS

// The maximum of both, that of the state where they are equal or one is NaN.
HWY_INLINE VF32 JoinedMax(VF32 state, VF32 partial) {
  return hn::IfThenElse(hn::Gt(partial, state), partial, state);
}

// What sums relative to the maximum `own` are multiplied by, relative to `max`.
HWY_INLINE VF32 JoinFactor(VF32 own, VF32 max) {
  return hn::IfThenElse(hn::Eq(own, max), hn::Set(DF32(), 1.0f),
                        ExpKeepNaN(hn::Sub(own, max)));
}

float JoinedSum(float state, float a, float partial, float b) {
  return state * a + partial * b;
}

// state = state * a + partial * b elementwise, [head_dim].
void MergeImpl(const float* partial, size_t head_dim, float* state) {
  const DF32 d;
  const auto state_max = hn::Set(d, state[head_dim]);
  const auto partial_max = hn::Set(d, partial[head_dim]);
  const auto joined_max = JoinedMax(state_max, partial_max);
  const float max = hn::GetLane(joined_max);
  const float a = hn::GetLane(JoinFactor(state_max, joined_max));
  const float b = hn::GetLane(JoinFactor(partial_max, joined_max));
  const auto va = hn::Set(d, a);
  const auto vb = hn::Set(d, b);
  for (size_t i = 0; i < head_dim; i += kLanes) {
    const auto scaled = hn::Mul(hn::LoadU(d, state + i), va);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, partial + i), vb, scaled), d, state + i);
  }
  state[head_dim] = max;
  state[head_dim + 1] =
      JoinedSum(state[head_dim + 1], a, partial[head_dim + 1], b);
}

#if GKV_NATIVE_PAIRS

// SpanKernels::join where SumPairs adds the values.
void JoinSpan(const SpanAddresses& addresses, const QueryTile& tile,
              const TokenRange* ranges, float* states) {
  HWY_ALIGN float scores[kMaxTileQueries][kAttentionSpan];
  Scores<FormatBF16>(addresses, tile, 0, kSpanGroups, scores);
  const DF32 d;
  const size_t head_dim = tile.head_dim;
  const size_t stride = PartialFloats(head_dim);
  // Those of the states, and those of the span.
  HWY_ALIGN float maxes[2][kMaxTileQueries] = {};
  float sums[kMaxTileQueries];
  for (size_t i = 0; i < tile.num_queries; ++i) {
    maxes[0][i] = states[i * stride + head_dim];
    Softmax<true>(ranges[i], tile.soft_cap, scores[i], &maxes[1][i], &sums[i]);
  }
  static_assert(kMaxTileQueries % kLanes == 0);
  HWY_ALIGN float kept[kMaxTileQueries], added[kMaxTileQueries];
  for (size_t i = 0; i < kMaxTileQueries; i += kLanes) {
    const auto state_max = hn::Load(d, maxes[0] + i);
    const auto span_max = hn::Load(d, maxes[1] + i);
    const auto max = JoinedMax(state_max, span_max);
    hn::Store(JoinFactor(state_max, max), d, kept + i);
    hn::Store(JoinFactor(span_max, max), d, added + i);
    hn::Store(max, d, maxes[0] + i);
  }
  for (size_t i = 0; i < tile.num_queries; ++i) {
    float* state = states + i * stride + head_dim;
    state[0] = maxes[0][i];
    state[1] = JoinedSum(state[1], kept[i], sums[i], added[i]);
  }
  SumPairs<JoinedSums>({addresses, tile.num_queries, ranges, scores, head_dim},
                       {states, stride, kept, added});
}

#endif  // GKV_NATIVE_PAIRS

SpanKernels SpanKernelsOf(KvDtype dtype) {
  switch (dtype) {
    case KvDtype::kF32:
      return {SpanPartial<FormatF32, false, SumTokens<FormatF32>>};
    case KvDtype::kInt8:
      return {SpanPartial<FormatInt8, false, SumTokens<FormatInt8>>};
    case KvDtype::kBF16:
#if GKV_NATIVE_PAIRS
      if (UsePairs()) {
        return {SpanPartial<FormatBF16, true, SumPairs<PartialSums>>, JoinSpan};
      }
#endif
      break;
  }
  return {SpanPartial<FormatBF16, true, SumRounded>};
}

void FinishImpl(const float* state, size_t head_dim, float* out) {
  const DF32 d;
  const auto scale = hn::Set(d, 1.0f / state[head_dim + 1]);
  for (size_t i = 0; i < head_dim; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, state + i), scale), d, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(SpanKernelsOf);
HWY_EXPORT(MergeImpl);
HWY_EXPORT(FinishImpl);

namespace {

// What a near cache holds at most. Queries that see less find it there, where
// those before them have read it.
constexpr size_t kNearCacheBytes = size_t{1} << 20;

bool IsNeutral(const float* partial, size_t head_dim) {
  return partial[head_dim] == -std::numeric_limits<float>::infinity() &&
         partial[head_dim + 1] == 0;
}

// Requires: the groups are set.
void FindAddresses(const KvHeadView& kv, size_t head_dim, size_t first,
                   SpanAddresses& addresses) {
  const size_t row_bytes = head_dim * ElementBytes(kv.dtype);
  const size_t row_scales = head_dim / kKvInt8Block;
  // Of an int8 strip: scales follow all values.
  const size_t scales_at = kv.block_tokens * row_bytes;
  for (size_t g = addresses.group_begin; g < addresses.group_end; ++g) {
    const size_t position = first + g * kKvGroup;
    const uint8_t* block =
        kv.blocks[position / kv.block_tokens - kv.first_block];
    const size_t token = position % kv.block_tokens;
    const uint8_t* keys = block + kv.key_offset;
    const uint8_t* values = block + kv.value_offset;
    addresses.keys[g] = keys + token * row_bytes;
    addresses.key_scales[g] =
        reinterpret_cast<const float*>(keys + scales_at) + token * row_scales;
    for (size_t t = 0; t < kKvGroup; ++t) {
      const size_t at = g * kKvGroup + t;
      addresses.values[at] = values + (token + t) * row_bytes;
      addresses.value_scales[at] =
          reinterpret_cast<const float*>(values + scales_at) +
          (token + t) * row_scales;
    }
  }
}

// Where what a tile sees of a span lies, and the next span if it is fetched.
class SpanReads {
 public:
  // `fetch_next`: the whole of the next span is in the view, and read soon. It
  // is fetched by tiles of which some query sees each group of this one.
  SpanReads(const KvHeadView& kv, const QueryTile& tile, size_t span,
            bool fetch_next) {
    const size_t first = span * kAttentionSpan;
    size_t begin = kAttentionSpan, end = 0;
    for (size_t i = 0; i < tile.num_queries; ++i) {
      const size_t lo = std::max(tile.begin[i], first);
      const size_t hi = std::min(tile.end[i], first + kAttentionSpan);
      ranges_[i] =
          lo < hi ? TokenRange{lo - first, hi - first} : TokenRange{0, 0};
      if (lo >= hi) continue;
      begin = std::min(begin, lo - first);
      end = std::max(end, hi - first);
    }
    if (begin >= end) begin = end = 0;
    own_.group_begin = begin / kKvGroup;
    own_.group_end = CeilDiv(end, kKvGroup);
    FindAddresses(kv, tile.head_dim, first, own_);
    if (!fetch_next || own_.group_begin != 0 || own_.group_end != kSpanGroups) {
      return;
    }
    next_.group_begin = 0;
    next_.group_end = kSpanGroups;
    FindAddresses(kv, tile.head_dim, first + kAttentionSpan, next_);
    own_.next = &next_;
  }
  SpanReads(const SpanReads&) = delete;
  SpanReads& operator=(const SpanReads&) = delete;

  const SpanAddresses& addresses() const { return own_; }
  const TokenRange* ranges() const { return ranges_; }

 private:
  TokenRange ranges_[kMaxTileQueries];
  SpanAddresses own_, next_;
};

// Whether each query sees the whole of a span, and has seen some before it.
bool SeeWholeSpan(const QueryTile& tile, size_t span) {
  const size_t first = span * kAttentionSpan;
  for (size_t i = 0; i < tile.num_queries; ++i) {
    if (tile.begin[i] >= first || tile.end[i] < first + kAttentionSpan) {
      return false;
    }
  }
  return true;
}

}  // namespace

void AttentionSpanPartial(const KvHeadView& kv, const QueryTile& tile,
                          size_t span, float* partial) {
  const SpanReads reads(kv, tile, span, /*fetch_next=*/false);
  HWY_DYNAMIC_DISPATCH(SpanKernelsOf)(kv.dtype).partial(
      reads.addresses(), tile, reads.ranges(), partial);
}

void AttentionMerge(const float* partial, size_t head_dim, float* state) {
  if (IsNeutral(partial, head_dim)) return;
  if (IsNeutral(state, head_dim)) {
    std::memcpy(state, partial, PartialFloats(head_dim) * sizeof(float));
    return;
  }
  HWY_DYNAMIC_DISPATCH(MergeImpl)(partial, head_dim, state);
}

void AttentionFinish(const float* state, size_t head_dim, float* out) {
  HWY_DYNAMIC_DISPATCH(FinishImpl)(state, head_dim, out);
}

void AttentionTile(const KvHeadView& kv, const QueryTile& tile, float* scratch,
                   float* const* out) {
  AttentionTileBy(HWY_DYNAMIC_DISPATCH(SpanKernelsOf)(kv.dtype), kv, tile,
                  scratch, out);
}

void AttentionTileBy(const SpanKernels& kernels, const KvHeadView& kv,
                     const QueryTile& tile, float* scratch, float* const* out) {
  const size_t stride = PartialFloats(tile.head_dim);
  float* const states = scratch;                              // [num_queries]
  float* const partial = states + tile.num_queries * stride;  // of one tile
  // The tiles of at most kMaxTileQueries, and which spans each sees.
  struct Part {
    QueryTile tile;
    size_t begin, end;
    float* state;
  };
  Part parts[kMaxBlockQueries / kMaxTileQueries];
  size_t num_parts = 0, begin = SIZE_MAX, end = 0;
  for (size_t i = 0; i < tile.num_queries; i += kMaxTileQueries) {
    const size_t count = std::min(kMaxTileQueries, tile.num_queries - i);
    Part& part = parts[num_parts++];
    part.tile = {tile.q + i, tile.begin + i, tile.end + i,
                 count,      tile.head_dim,  tile.soft_cap};
    part.begin = *std::min_element(part.tile.begin, part.tile.begin + count) /
                 kAttentionSpan;
    part.end = CeilDiv(*std::max_element(part.tile.end, part.tile.end + count),
                       kAttentionSpan);
    part.state = states + i * stride;
    begin = std::min(begin, part.begin);
    end = std::max(end, part.end);
  }
  const size_t span_bytes =
      2 * kAttentionSpan * tile.head_dim * ElementBytes(kv.dtype);
  const bool far = (end - begin) * span_bytes > kNearCacheBytes;
  for (size_t span = begin; span < end; ++span) {
    // By the first part alone, and not the last span, which may not be whole.
    bool fetch_next = far && span + 2 < end;
    for (const Part& part : std::span(parts, num_parts)) {
      if (span < part.begin || span >= part.end) continue;
      const SpanReads reads(kv, part.tile, span,
                            std::exchange(fetch_next, false));
      if (kernels.join != nullptr && SeeWholeSpan(part.tile, span)) {
        kernels.join(reads.addresses(), part.tile, reads.ranges(), part.state);
        continue;
      }
      const bool first = span == part.begin;
      kernels.partial(reads.addresses(), part.tile, reads.ranges(),
                      first ? part.state : partial);
      if (first) continue;
      for (size_t i = 0; i < part.tile.num_queries; ++i) {
        AttentionMerge(partial + i * stride, tile.head_dim,
                       part.state + i * stride);
      }
    }
  }
  for (size_t i = 0; i < tile.num_queries; ++i) {
    AttentionFinish(states + i * stride, tile.head_dim, out[i]);
  }
}

}  // namespace gkv

#endif  // HWY_ONCE
