// Scores and weighted sums over the stored keys and values of one span.
// Included once per Highway target.

#if defined(GEMMAKV_OPS_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_ATTENTION_INL_H_
#undef GEMMAKV_OPS_ATTENTION_INL_H_
#else
#define GEMMAKV_OPS_ATTENTION_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/attention.h"
#include "ops/attention_span.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

// Accumulators that fit the registers beside what they are fed from. Scores
// take more of them: fewer queries and keys are read for each product then.
// Values would gain nothing.
inline constexpr size_t kMaxAccumulators = kLanes == 16 ? 16 : 8;
inline constexpr size_t kMaxScoreAccumulators = kLanes == 16 ? 24 : 8;

struct FormatF32 {
  using Element = float;
  static constexpr bool kScaled = false;
  static HWY_INLINE VF32 Load(const Element* at) {
    return hn::LoadU(DF32(), at);
  }
};

struct FormatBF16 {
  using Element = hwy::bfloat16_t;
  static constexpr bool kScaled = false;
  static HWY_INLINE VF32 Load(const Element* at) {
    const DF32 d;
    const hn::Rebind<Element, DF32> d16;
    return hn::PromoteTo(d, hn::LoadU(d16, at));
  }
};

struct FormatInt8 {
  using Element = int8_t;
  static constexpr bool kScaled = true;
  static HWY_INLINE VF32 Load(const Element* at) {
    const DF32 d;
    const DI32 d32;
    const hn::Rebind<Element, DF32> d8;
    return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, at)));
  }
};

inline constexpr size_t kLineBytes = 64;

// Fetches a line into the second-level cache: the first has no room for it.
HWY_INLINE void FetchLine(const void* at) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(at, /*rw=*/0, /*locality=*/2);
#else
  hwy::Prefetch(static_cast<const uint8_t*>(at));
#endif
}

// Of several vectors. Those of less than a line ask for theirs more than once.
HWY_INLINE void FetchLines(const void* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLineBytes) {
    FetchLine(static_cast<const uint8_t*>(at) + i);
  }
}

// body<kQueries, kAhead>(i) for queries [i, i + kQueries): as many as fit
// kMost, then 4, then 1 at a time. kAhead: these fetch what comes next, the
// first alone, if `ahead` and there are 4.
template <size_t kMost, class Body>
HWY_INLINE void ForChunks(size_t num_queries, bool ahead, const Body& body) {
  static_assert(kMost % 4 == 0);
  size_t i = 0;
  if (ahead && num_queries >= kMost) {
    body.template operator()<kMost, true>(i);
    i += kMost;
  } else if (ahead && num_queries >= 4) {
    body.template operator()<4, true>(i);
    i += 4;
  }
  for (; i + kMost <= num_queries; i += kMost) {
    body.template operator()<kMost, false>(i);
  }
  for (; i + 4 <= num_queries; i += 4) body.template operator()<4, false>(i);
  for (; i < num_queries; ++i) body.template operator()<1, false>(i);
}

// One vector of kLanes tokens of a group.
struct KeyColumn {
  const void* keys;
  const float* scales;
  size_t at;         // first token, relative to the span
  const void* next;  // the same column's keys of the next span, or null
};

// scores[i][tokens of the columns] = dot(q[i], keys). Dimensions are walked in
// order; with scales, in blocks of 32 that enter as one product each. kAhead:
// the keys of `next` are fetched, line by line.
template <class Format, size_t kQueries, size_t kColumns, bool kAhead>
HWY_INLINE void ScoreTile(const float* const* q, const KeyColumn* columns,
                          size_t head_dim,
                          float (*HWY_RESTRICT scores)[kAttentionSpan]) {
  using Element = typename Format::Element;
  const DF32 d;
  VF32 acc[kQueries][kColumns];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t c = 0; c < kColumns; ++c) acc[i][c] = hn::Zero(d);
  }
  const Element* keys[kColumns];
  for (size_t c = 0; c < kColumns; ++c) {
    keys[c] = static_cast<const Element*>(columns[c].keys);
  }
  const auto dots = [&](size_t begin, size_t end,
                        VF32(&sums)[kQueries][kColumns]) HWY_ATTR {
    const auto dot = [&](size_t k) HWY_ATTR {
      VF32 key[kColumns];
      for (size_t c = 0; c < kColumns; ++c) {
        key[c] = Format::Load(keys[c] + k * kKvGroup);
      }
      for (size_t i = 0; i < kQueries; ++i) {
        const VF32 query = hn::Set(d, q[i][k]);
        for (size_t c = 0; c < kColumns; ++c) {
          sums[i][c] = hn::MulAdd(key[c], query, sums[i][c]);
        }
      }
    };
    if constexpr (kAhead) {
      constexpr size_t kPerLine = kLineBytes / (kKvGroup * sizeof(Element));
      for (size_t k = begin; k < end; k += kPerLine) {
        for (size_t c = 0; c < kColumns; ++c) {
          FetchLine(static_cast<const Element*>(columns[c].next) +
                    k * kKvGroup);
        }
        for (size_t i = 0; i < kPerLine; ++i) dot(k + i);
      }
    } else {
      for (size_t k = begin; k < end; ++k) dot(k);
    }
  };
  if constexpr (Format::kScaled) {
    for (size_t b = 0; b < head_dim / kKvInt8Block; ++b) {
      VF32 block[kQueries][kColumns];
      for (size_t i = 0; i < kQueries; ++i) {
        for (size_t c = 0; c < kColumns; ++c) block[i][c] = hn::Zero(d);
      }
      dots(b * kKvInt8Block, (b + 1) * kKvInt8Block, block);
      for (size_t c = 0; c < kColumns; ++c) {
        const VF32 scale = hn::LoadU(d, columns[c].scales + b * kKvGroup);
        for (size_t i = 0; i < kQueries; ++i) {
          acc[i][c] = hn::MulAdd(block[i][c], scale, acc[i][c]);
        }
      }
    }
  } else {
    dots(0, head_dim, acc);
  }
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t c = 0; c < kColumns; ++c) {
      hn::StoreU(acc[i][c], d, scores[i] + columns[c].at);
    }
  }
}

template <class Format, size_t kQueries, bool kAhead>
HWY_INLINE void ScoreColumns(const float* const* q, const KeyColumn* columns,
                             size_t num_columns, size_t head_dim,
                             float (*scores)[kAttentionSpan]) {
  constexpr size_t kBlocks = Format::kScaled ? 2 : 1;
  constexpr size_t kFit = kMaxScoreAccumulators / (kQueries * kBlocks);
  constexpr size_t kColumns = kFit < 1 ? 1 : (kFit > 4 ? 4 : kFit);
  size_t c = 0;
  for (; c + kColumns <= num_columns; c += kColumns) {
    ScoreTile<Format, kQueries, kColumns, kAhead>(q, columns + c, head_dim,
                                                  scores);
  }
  for (; c < num_columns; ++c) {
    ScoreTile<Format, kQueries, 1, kAhead>(q, columns + c, head_dim, scores);
  }
}

// scores[i][t] for all queries and the token groups [group_begin, group_end).
template <class Format>
HWY_INLINE void Scores(const SpanAddresses& addresses, const QueryTile& tile,
                       size_t group_begin, size_t group_end,
                       float (*scores)[kAttentionSpan]) {
  using Element = typename Format::Element;
  KeyColumn columns[kSpanGroups * kVectorsPer16];
  size_t num_columns = 0;
  const SpanAddresses* next = addresses.next;
  for (size_t g = group_begin; g < group_end; ++g) {
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      const size_t lane = v * kLanes;
      columns[num_columns++] = {
          reinterpret_cast<const Element*>(addresses.keys[g]) + lane,
          Format::kScaled ? addresses.key_scales[g] + lane : nullptr,
          g * kKvGroup + lane,
          next == nullptr
              ? nullptr
              : reinterpret_cast<const Element*>(next->keys[g]) + lane};
    }
  }
  ForChunks<8>(tile.num_queries, next != nullptr,
               [&]<size_t kQueries, bool kAhead>(size_t i) GKV_INLINE_ATTR {
                 ScoreColumns<Format, kQueries, kAhead>(
                     tile.q + i, columns, num_columns, tile.head_dim,
                     scores + i);
               });
}

// sums[i][dims of the vectors] += weights[i][t] * values[t], tokens [begin,
// end) in order. `at` is the first dimension. kAhead: the same values of the
// next span are fetched.
template <class Format, size_t kQueries, size_t kVectors, bool kAhead>
HWY_INLINE void ValueTile(const SpanAddresses& addresses,
                          const float (*HWY_RESTRICT weights)[kAttentionSpan],
                          size_t begin, size_t end, size_t at,
                          float* HWY_RESTRICT sums, size_t sums_stride) {
  using Element = typename Format::Element;
  const DF32 d;
  VF32 acc[kQueries][kVectors];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      acc[i][v] = hn::LoadU(d, sums + i * sums_stride + at + v * kLanes);
    }
  }
  for (size_t t = begin; t < end; ++t) {
    const Element* row =
        reinterpret_cast<const Element*>(addresses.values[t]) + at;
    if constexpr (kAhead) {
      FetchLines(
          reinterpret_cast<const Element*>(addresses.next->values[t]) + at,
          kVectors * kLanes * sizeof(Element));
    }
    VF32 value[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      value[v] = Format::Load(row + v * kLanes);
      if constexpr (Format::kScaled) {
        const size_t block = (at + v * kLanes) / kKvInt8Block;
        value[v] =
            hn::Mul(value[v], hn::Set(d, addresses.value_scales[t][block]));
      }
    }
    for (size_t i = 0; i < kQueries; ++i) {
      const VF32 weight = hn::Set(d, weights[i][t]);
      for (size_t v = 0; v < kVectors; ++v) {
        acc[i][v] = hn::MulAdd(weight, value[v], acc[i][v]);
      }
    }
  }
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      hn::StoreU(acc[i][v], d, sums + i * sums_stride + at + v * kLanes);
    }
  }
}

template <class Format, size_t kQueries, bool kAhead = false>
HWY_INLINE void AddValues(const SpanAddresses& addresses,
                          const float (*weights)[kAttentionSpan], size_t begin,
                          size_t end, size_t head_dim, float* sums,
                          size_t sums_stride) {
  constexpr size_t kFit = kMaxAccumulators / kQueries;
  constexpr size_t kVectors = kFit < 1 ? 1 : (kFit > 8 ? 8 : kFit);
  constexpr size_t kStep = kVectors * kLanes;
  if (begin >= end) return;
  size_t at = 0;
  for (; at + kStep <= head_dim; at += kStep) {
    ValueTile<Format, kQueries, kVectors, kAhead>(addresses, weights, begin,
                                                  end, at, sums, sums_stride);
  }
  for (; at < head_dim; at += kLanes) {
    ValueTile<Format, kQueries, 1, kAhead>(addresses, weights, begin, end, at,
                                           sums, sums_stride);
  }
}

// Adds the values of every query in the chunk. Tokens that all queries see are
// read once for all; those at the ends, which only some see, are added query by
// query, so that a token never enters the sum of a query that does not see it
// (a weight of zero would let a NaN through).
template <class Format, size_t kQueries, bool kAhead>
HWY_INLINE void ValuesOfChunk(const SpanAddresses& addresses,
                              const TokenRange* ranges,
                              const float (*weights)[kAttentionSpan],
                              size_t head_dim, float* sums,
                              size_t sums_stride) {
  size_t begin = 0, end = kAttentionSpan;  // what all see
  for (size_t i = 0; i < kQueries; ++i) {
    begin = HWY_MAX(begin, ranges[i].begin);
    end = HWY_MIN(end, ranges[i].end);
  }
  if (begin >= end) begin = end = 0;
  for (size_t i = 0; i < kQueries; ++i) {
    const size_t head_end =
        begin == end ? ranges[i].end : HWY_MAX(begin, ranges[i].begin);
    AddValues<Format, 1>(addresses, weights + i, ranges[i].begin, head_end,
                         head_dim, sums + i * sums_stride, sums_stride);
  }
  if (begin == end) return;
  AddValues<Format, kQueries, kAhead>(addresses, weights, begin, end, head_dim,
                                      sums, sums_stride);
  for (size_t i = 0; i < kQueries; ++i) {
    AddValues<Format, 1>(addresses, weights + i, end, ranges[i].end, head_dim,
                         sums + i * sums_stride, sums_stride);
  }
}

template <class Format>
HWY_INLINE void Values(const SpanAddresses& addresses, size_t num_queries,
                       const TokenRange* ranges,
                       const float (*weights)[kAttentionSpan], size_t head_dim,
                       float* sums, size_t sums_stride) {
  // Values are too many for the nearest cache: the fewer passes over them, the
  // better.
  ForChunks<kMaxAccumulators / 2>(
      num_queries, addresses.next != nullptr,
      [&]<size_t kQueries, bool kAhead>(size_t i) GKV_INLINE_ATTR {
        ValuesOfChunk<Format, kQueries, kAhead>(
            addresses, ranges + i, weights + i, head_dim,
            sums + i * sums_stride, sums_stride);
      });
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_ATTENTION_INL_H_
