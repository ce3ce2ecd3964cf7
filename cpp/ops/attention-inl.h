// The kernel of attention, for a tile of queries and one span: SpanPartial
// computes scores of the queries with the keys, the weights that follow from
// them, and weighted sums of the values. Two policies say how numbers are
// loaded:
//   Format  makes floats of a vector of stored keys or values
//   Rows    loads values row by row, and their weights, and adds them:
//           TokenRows of any format, PairRows of bf16 (attention_bf16-inl.h)
// Included once per Highway target.

#if defined(GEMMAKV_OPS_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_ATTENTION_INL_H_
#undef GEMMAKV_OPS_ATTENTION_INL_H_
#else
#define GEMMAKV_OPS_ATTENTION_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
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

// `x` as bf16, ties to even; the lower 16 bits are zero. By integers: that
// depends on no mode of the processor.
HWY_INLINE VF32 RoundToBF16(VF32 x) {
  const DF32 d;
  const DU32 du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto up = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000u));
  const auto kept = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, up);
  return hn::BitCast(d, hn::And(kept, hn::Set(du, 0xFFFF0000u)));
}

// Exp with NaN kept.
HWY_INLINE VF32 ExpKeepNaN(VF32 x) {
  const DF32 d;
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// Turns the scores of one query into weights exp(score - max), zero where the
// query does not see the token. Writes max and sum. kRounded: weights are bf16,
// and the sum is that of what they are then.
template <bool kRounded>
void Softmax(const TokenRange& range, float soft_cap,
             float* HWY_RESTRICT scores, float* max_out, float* sum_out) {
  const DF32 d;
  const DI32 di;
  const size_t begin = range.begin / 16 * 16;
  const auto lo = hn::Set(di, static_cast<int32_t>(range.begin));
  const auto hi = hn::Set(di, static_cast<int32_t>(range.end));
  const auto cap = hn::Set(d, soft_cap);
  const auto sees = [&](size_t t) HWY_ATTR {
    const auto at = hn::Iota(di, static_cast<int32_t>(t));
    return hn::RebindMask(d, hn::And(hn::Ge(at, lo), hn::Lt(at, hi)));
  };
  auto max = MinusInfinity();
  for (size_t t = begin; t < range.end; t += kLanes) {
    auto score = hn::LoadU(d, scores + t);
    if (soft_cap > 0) {
      score = hn::Mul(cap, hn::Tanh(d, hn::Div(score, cap)));  // keeps NaN
    }
    score = hn::IfThenElse(sees(t), score, MinusInfinity());
    hn::StoreU(score, d, scores + t);
    max = hn::Max(max, score);
  }
  const float max_score = hn::ReduceMax(d, max);
  const auto m = hn::Set(d, max_score);
  // Sixteen partial sums by position % 16.
  VF32 sums[kVectorsPer16];
  for (auto& sum : sums) sum = hn::Zero(d);
  for (size_t t = begin; t < range.end; t += 16) {
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      const size_t at = t + v * kLanes;
      if (at >= range.end) break;
      const auto score = hn::LoadU(d, scores + at);
      auto weight = ExpKeepNaN(hn::Sub(score, m));  // unseen: exp(-inf)
      if constexpr (kRounded) weight = RoundToBF16(weight);
      hn::StoreU(weight, d, scores + at);
      sums[v] = hn::Add(sums[v], weight);
    }
  }
  HWY_ALIGN float partials[16];
  for (size_t v = 0; v < kVectorsPer16; ++v) {
    hn::Store(sums[v], d, partials + v * kLanes);
  }
  *max_out = max_score;
  *sum_out = JoinSums(partials);
}

// Neutral accumulators, and the weights of all queries.
template <bool kRounded>
void Weights(const QueryTile& tile, const TokenRange* ranges,
             float (*scores)[kAttentionSpan], float* partial) {
  const size_t stride = PartialFloats(tile.head_dim);
  for (size_t i = 0; i < tile.num_queries; ++i) {
    float* out = partial + i * stride;
    std::memset(out, 0, tile.head_dim * sizeof(float));
    Softmax<kRounded>(ranges[i], tile.soft_cap, scores[i], out + tile.head_dim,
                      out + tile.head_dim + 1);
  }
}

// The values of a format, position by position. A row is one position.
template <class Format>
struct TokenRows {
  using Element = typename Format::Element;
  using Vector = VF32;
  static constexpr size_t kTokens = 1;  // of a row

  const SpanAddresses& addresses;
  const float (*weights)[kAttentionSpan];  // [queries]

  // For queries from `query` on.
  HWY_INLINE TokenRows From(size_t query) const {
    return {addresses, weights + query};
  }
  // Fetches kDims dimensions, from `at` on, of a row of the next span.
  template <size_t kDims>
  HWY_INLINE void Fetch(size_t row, size_t at) const {
    FetchLines(
        reinterpret_cast<const Element*>(addresses.next->values[row]) + at,
        kDims * sizeof(Element));
  }
  // Dimensions [at, at + kLanes) of a row.
  HWY_INLINE VF32 Load(size_t row, size_t at) const {
    const VF32 values = Format::Load(
        reinterpret_cast<const Element*>(addresses.values[row]) + at);
    if constexpr (Format::kScaled) {
      const float scale = addresses.value_scales[row][at / kKvInt8Block];
      return hn::Mul(values, hn::Set(DF32(), scale));
    }
    return values;
  }
  HWY_INLINE VF32 Weight(size_t query, size_t row) const {
    return hn::Set(DF32(), weights[query][row]);
  }
  static HWY_INLINE VF32 Add(VF32 weight, VF32 values, VF32 sum) {
    return hn::MulAdd(weight, values, sum);
  }
};

// Sums of a span's values, after what is there.
struct PartialSums {
  static constexpr bool kOfWholeSpans = false;

  float* sums;
  size_t stride;  // of the queries

  HWY_INLINE PartialSums From(size_t query) const {
    return {sums + query * stride, stride};
  }
  HWY_INLINE VF32 Begin(size_t query, size_t k) const {
    return hn::LoadU(DF32(), sums + query * stride + k);
  }
  HWY_INLINE void End(size_t query, size_t k, VF32 sum) const {
    hn::StoreU(sum, DF32(), sums + query * stride + k);
  }
};

// The values of a span that are added up, weighted, for a tile of queries.
struct ValueTask {
  const SpanAddresses& addresses;
  size_t num_queries;
  const TokenRange* ranges;
  const float (*weights)[kAttentionSpan];  // [num_queries]
  size_t head_dim;
};

// Adds the weighted rows [begin, end) in order to the sums of kQueries queries,
// in the dimensions of the vectors; `at` is the first. kAhead: the same rows of
// the next span are fetched.
template <size_t kQueries, size_t kVectors, bool kAhead, class Rows, class Sums>
HWY_INLINE void ValueTile(const Rows& rows, size_t begin, size_t end, size_t at,
                          const Sums& sums) {
  VF32 acc[kQueries][kVectors];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      acc[i][v] = sums.Begin(i, at + v * kLanes);
    }
  }
  for (size_t row = begin; row < end; ++row) {
    if constexpr (kAhead) rows.template Fetch<kVectors * kLanes>(row, at);
    typename Rows::Vector values[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      values[v] = rows.Load(row, at + v * kLanes);
    }
    for (size_t i = 0; i < kQueries; ++i) {
      const auto weight = rows.Weight(i, row);
      for (size_t v = 0; v < kVectors; ++v) {
        acc[i][v] = Rows::Add(weight, values[v], acc[i][v]);
      }
    }
  }
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      sums.End(i, at + v * kLanes, acc[i][v]);
    }
  }
}

template <size_t kQueries, bool kAhead = false, class Rows, class Sums>
HWY_INLINE void AddValues(const Rows& rows, size_t begin, size_t end,
                          size_t head_dim, const Sums& sums) {
  constexpr size_t kVectors = HWY_MIN(kMaxAccumulators / kQueries, size_t{8});
  constexpr size_t kStep = kVectors * kLanes;
  if (begin >= end) return;
  size_t at = 0;
  for (; at + kStep <= head_dim; at += kStep) {
    ValueTile<kQueries, kVectors, kAhead>(rows, begin, end, at, sums);
  }
  for (; at < head_dim; at += kLanes) {
    ValueTile<kQueries, 1, kAhead>(rows, begin, end, at, sums);
  }
}

// Adds the values of every query in the chunk. Rows that all queries see are
// read once for all; those at the ends, which only some see, are added query by
// query, so that a token never enters the sum of a query that does not see it
// (a weight of zero would let a NaN through).
template <size_t kQueries, bool kAhead, class Rows>
HWY_INLINE void ValuesOfChunk(const Rows& rows, const TokenRange* ranges,
                              size_t head_dim, const PartialSums& sums) {
  constexpr size_t kTokens = Rows::kTokens;
  // The rows that a query sees whole.
  const auto first = [&](size_t i) {
    return (ranges[i].begin + kTokens - 1) / kTokens;
  };
  const auto last = [&](size_t i) { return ranges[i].end / kTokens; };
  size_t begin = 0, end = kAttentionSpan / kTokens;  // what all see
  for (size_t i = 0; i < kQueries; ++i) {
    begin = HWY_MAX(begin, first(i));
    end = HWY_MIN(end, last(i));
  }
  const bool common = begin < end;
  for (size_t i = 0; i < kQueries; ++i) {
    if (ranges[i].begin == ranges[i].end) continue;
    if constexpr (kTokens == 2) {
      if (ranges[i].begin % 2 == 1) {
        rows.AddHalf(i, ranges[i].begin, head_dim, sums.From(i));
      }
    }
    AddValues<1>(rows.From(i), first(i), common ? begin : last(i), head_dim,
                 sums.From(i));
  }
  if (common) {
    AddValues<kQueries, kAhead>(rows, begin, end, head_dim, sums);
  }
  for (size_t i = 0; i < kQueries; ++i) {
    if (ranges[i].begin == ranges[i].end) continue;
    if (common) {
      AddValues<1>(rows.From(i), end, last(i), head_dim, sums.From(i));
    }
    if constexpr (kTokens == 2) {
      if (ranges[i].end % 2 == 1) {
        rows.AddHalf(i, ranges[i].end - 1, head_dim, sums.From(i));
      }
    }
  }
}

// Adds all values of the task, of which these are the rows.
template <class Rows, class Sums>
HWY_INLINE void SumRows(const Rows& rows, const ValueTask& task,
                        const Sums& sums) {
  // Values are too many for the nearest cache: the fewer passes over them, the
  // better.
  ForChunks<kMaxAccumulators / 2>(
      task.num_queries, task.addresses.next != nullptr,
      [&]<size_t kQueries, bool kAhead>(size_t i) GKV_INLINE_ATTR {
        if constexpr (Sums::kOfWholeSpans) {
          AddValues<kQueries, kAhead>(rows.From(i), 0,
                                      kAttentionSpan / Rows::kTokens,
                                      task.head_dim, sums.From(i));
        } else {
          ValuesOfChunk<kQueries, kAhead>(rows.From(i), task.ranges + i,
                                          task.head_dim, sums.From(i));
        }
      });
}

// Adds the values position by position, with weights as they are.
template <class Format>
HWY_INLINE void SumTokens(const ValueTask& task, const PartialSums& sums) {
  SumRows(TokenRows<Format>{task.addresses, task.weights}, task, sums);
}

// Writes the partial of one span for each query of the tile: a SpanKernel.
// kSumValues adds the values.
template <class Format, bool kRounded,
          void (*kSumValues)(const ValueTask&, const PartialSums&)>
void SpanPartial(const SpanAddresses& addresses, const QueryTile& tile,
                 const TokenRange* ranges, float* partial) {
  HWY_ALIGN float scores[kMaxTileQueries][kAttentionSpan];
  Scores<Format>(addresses, tile, addresses.group_begin, addresses.group_end,
                 scores);
  Weights<kRounded>(tile, ranges, scores, partial);
  kSumValues({addresses, tile.num_queries, ranges, scores, tile.head_dim},
             {partial, PartialFloats(tile.head_dim)});
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_ATTENTION_INL_H_
