// Weighted sums of values, both in bf16. Included once per Highway target.
//
// Weights are rounded to bf16, too, so that processors that have an instruction
// for it take two positions at once:
//   sum = fma(weight, value, sum) of the first, then of the second,
// where numbers too small to be normal count as zero, before and behind each.
// That is what Values makes of such weights on a thread that counts so.

#if defined(GEMMAKV_OPS_ATTENTION_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef GEMMAKV_OPS_ATTENTION_BF16_INL_H_
#undef GEMMAKV_OPS_ATTENTION_BF16_INL_H_
#else
#define GEMMAKV_OPS_ATTENTION_BF16_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "base/rounding.h"
#include "hwy/highway.h"
#include "ops/attention-inl.h"
#include "ops/attention.h"
#include "ops/attention_span.h"
#include "ops/vector16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

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

// Numbers too small to be normal count as zero on this thread, as long as one
// of these lives. What is computed meanwhile must be in functions that are not
// inlined.
class ScopedFlushToZero {
 public:
#if HWY_ARCH_X86
  static constexpr unsigned kFlushAndDenormalsAreZero = 0x8040;
  ScopedFlushToZero() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kFlushAndDenormalsAreZero);
  }
  ~ScopedFlushToZero() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
  ScopedFlushToZero() {}
  ~ScopedFlushToZero() {}
#endif
};

// Values of bf16 weights. An odd position at the end has a partner of weight
// and value zero, which makes a negative zero positive.
HWY_NOINLINE void RoundedValues(const SpanAddresses& addresses,
                                size_t num_queries, const TokenRange* ranges,
                                const float (*weights)[kAttentionSpan],
                                size_t head_dim, float* sums,
                                size_t sums_stride) {
  Values<FormatBF16>(addresses, num_queries, ranges, weights, head_dim, sums,
                     sums_stride);
  const DF32 d;
  for (size_t i = 0; i < num_queries; ++i) {
    if (ranges[i].end % 2 == 0) continue;
    float* sum = sums + i * sums_stride;
    for (size_t k = 0; k < head_dim; k += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, sum + k), hn::Zero(d)), d, sum + k);
    }
  }
}

#undef GKV_NATIVE_PAIRS  // by an earlier target
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_ZEN4 && \
    !defined(HWY_AVX3_DISABLE_AVX512BF16)
#define GKV_NATIVE_PAIRS 1

// Of two positions, the first of which is even, each dimension is one lane. The
// instruction adds the product of upper halves first, so that is where the
// first position goes.
using DU16 = hn::Repartition<uint16_t, DF32>;
using Pair = hn::Vec<DU16>;

// What no query sees.
HWY_ALIGN inline constexpr uint16_t kUnseen[kMaxHeadDim] = {};

HWY_INLINE Pair LoadPair(const uint16_t* first, const uint16_t* second) {
  HWY_ALIGN static constexpr uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const DU16 d;
  const hn::Half<DU16> dh;
  const auto rows = hn::Combine(d, hn::LoadU(dh, first), hn::LoadU(dh, second));
  return hn::TableLookupLanes(rows, hn::SetTableIndices(d, kOrder));
}

HWY_INLINE VF32 AddPair(uint32_t weights, Pair values, VF32 sum) {
  const auto both = hn::BitCast(DU16(), hn::Set(DU32(), weights));
  return VF32{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(both.raw),
                               reinterpret_cast<__m512bh>(values.raw))};
}

// The bf16 weights of `count` tokens in pairs; `count` is a multiple of 32.
HWY_INLINE void PackWeights(const float* weights, size_t count, uint32_t* out) {
  const DU32 d;
  for (size_t i = 0; i < count; i += 2 * kLanes) {
    const auto a = hn::BitCast(d, hn::LoadU(DF32(), weights + i));
    const auto b = hn::BitCast(d, hn::LoadU(DF32(), weights + i + kLanes));
    const auto second = hn::ShiftRight<16>(hn::ConcatOdd(d, b, a));
    hn::StoreU(hn::Or(hn::ConcatEven(d, b, a), second), d, out + i / 2);
  }
}

// Sums of a span's values: behind what is there.
struct PartialSums {
  float* sums;
  size_t stride;  // of the queries

  HWY_INLINE VF32 Begin(size_t query, size_t k) const {
    return hn::LoadU(DF32(), sums + query * stride + k);
  }
  HWY_INLINE void End(size_t query, size_t k, VF32 sum) const {
    hn::StoreU(sum, DF32(), sums + query * stride + k);
  }
};

// The same, from zero, joined with the sums of earlier spans as Merge does it.
struct JoinedSums {
  float* states;
  size_t stride;
  const float* kept;   // of each query, the factor of what is there
  const float* added;  // and of what comes to it

  HWY_INLINE VF32 Begin(size_t /*query*/, size_t /*k*/) const {
    return hn::Zero(DF32());
  }
  HWY_INLINE void End(size_t query, size_t k, VF32 sum) const {
    const DF32 d;
    float* at = states + query * stride + k;
    const auto scaled = hn::Mul(hn::LoadU(d, at), hn::Set(d, kept[query]));
    hn::StoreU(hn::MulAdd(sum, hn::Set(d, added[query]), scaled), d, at);
  }
};

// Sums of the dims of the vectors: weights[i][p] * the values of pair p, pairs
// [begin, end) in order. `rows` are those of all tokens, `at` the first
// dimension. kAhead: the same dimensions of the rows of `next` are fetched.
template <size_t kQueries, size_t kVectors, bool kAhead, class Sums>
HWY_INLINE void PairTile(const uint8_t* const* rows, const uint8_t* const* next,
                         const uint32_t* const* weights, size_t begin,
                         size_t end, size_t at, const Sums& sums) {
  VF32 acc[kQueries][kVectors];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      acc[i][v] = sums.Begin(i, at + v * kLanes);
    }
  }
  for (size_t p = begin; p < end; ++p) {
    const auto* first = reinterpret_cast<const uint16_t*>(rows[2 * p]) + at;
    const auto* second =
        reinterpret_cast<const uint16_t*>(rows[2 * p + 1]) + at;
    if constexpr (kAhead) {
      constexpr size_t kBytes = kVectors * kLanes * sizeof(uint16_t);
      FetchLines(next[2 * p] + at * sizeof(uint16_t), kBytes);
      FetchLines(next[2 * p + 1] + at * sizeof(uint16_t), kBytes);
    }
    Pair values[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      values[v] = LoadPair(first + v * kLanes, second + v * kLanes);
    }
    for (size_t i = 0; i < kQueries; ++i) {
      for (size_t v = 0; v < kVectors; ++v) {
        acc[i][v] = AddPair(weights[i][p], values[v], acc[i][v]);
      }
    }
  }
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t v = 0; v < kVectors; ++v) {
      sums.End(i, at + v * kLanes, acc[i][v]);
    }
  }
}

template <size_t kQueries, bool kAhead = false, class Sums>
HWY_INLINE void AddPairs(const uint8_t* const* rows, const uint8_t* const* next,
                         const uint32_t* const* weights, size_t begin,
                         size_t end, size_t head_dim, const Sums& sums) {
  constexpr size_t kVectors = HWY_MIN(kMaxAccumulators / kQueries, size_t{8});
  constexpr size_t kStep = kVectors * kLanes;
  if (begin >= end) return;
  size_t at = 0;
  for (; at + kStep <= head_dim; at += kStep) {
    PairTile<kQueries, kVectors, kAhead>(rows, next, weights, begin, end, at,
                                         sums);
  }
  for (; at < head_dim; at += kLanes) {
    PairTile<kQueries, 1, kAhead>(rows, next, weights, begin, end, at, sums);
  }
}

// Of a pair of which a query sees only `token`. `weight` is the token's.
HWY_INLINE void AddHalfPair(const SpanAddresses& addresses, size_t token,
                            float weight, size_t head_dim, float* sum) {
  const auto* unseen = reinterpret_cast<const uint8_t*>(kUnseen);
  const uint32_t bits = hwy::BitCastScalar<uint32_t>(weight);
  const uint32_t packed = token % 2 == 0 ? bits : bits >> 16;
  const uint8_t* rows[2] = {unseen, unseen};
  rows[token % 2] = addresses.values[token];
  const uint32_t* weights = &packed;
  AddPairs<1>(rows, nullptr, &weights, 0, 1, head_dim, PartialSums{sum, 0});
}

// Adds the values of every query in the chunk. Pairs that all queries see are
// read once for all, and with kAhead those of the next span are fetched
// meanwhile; those at the ends are added query by query.
template <size_t kQueries, bool kAhead>
HWY_INLINE void PairsOfChunk(const SpanAddresses& addresses,
                             const TokenRange* ranges,
                             const float (*weights)[kAttentionSpan],
                             const uint32_t* const* packed, size_t head_dim,
                             float* sums, size_t sums_stride) {
  const auto first = [&](size_t i) { return (ranges[i].begin + 1) / 2; };
  const auto last = [&](size_t i) { return ranges[i].end / 2; };
  size_t begin = 0, end = kAttentionSpan / 2;  // what all see
  for (size_t i = 0; i < kQueries; ++i) {
    begin = HWY_MAX(begin, first(i));
    end = HWY_MIN(end, last(i));
  }
  const bool common = begin < end;
  for (size_t i = 0; i < kQueries; ++i) {
    if (ranges[i].begin == ranges[i].end) continue;
    float* sum = sums + i * sums_stride;
    if (ranges[i].begin % 2 == 1) {
      AddHalfPair(addresses, ranges[i].begin, weights[i][ranges[i].begin],
                  head_dim, sum);
    }
    AddPairs<1>(addresses.values, nullptr, packed + i, first(i),
                common ? begin : last(i), head_dim, PartialSums{sum, 0});
  }
  if (common) {
    AddPairs<kQueries, kAhead>(
        addresses.values, kAhead ? addresses.next->values : nullptr, packed,
        begin, end, head_dim, PartialSums{sums, sums_stride});
  }
  for (size_t i = 0; i < kQueries; ++i) {
    if (ranges[i].begin == ranges[i].end) continue;
    float* sum = sums + i * sums_stride;
    if (common) {
      AddPairs<1>(addresses.values, nullptr, packed + i, end, last(i), head_dim,
                  PartialSums{sum, 0});
    }
    if (ranges[i].end % 2 == 1) {
      AddHalfPair(addresses, ranges[i].end - 1, weights[i][ranges[i].end - 1],
                  head_dim, sum);
    }
  }
}

// RoundedValues by the instruction, which counts small numbers as zero by
// itself.
HWY_NOINLINE void PairValues(const SpanAddresses& addresses, size_t num_queries,
                             const TokenRange* ranges,
                             const float (*weights)[kAttentionSpan],
                             size_t head_dim, float* sums, size_t sums_stride) {
  HWY_ALIGN uint32_t packed[kMaxTileQueries][kAttentionSpan / 2];
  const uint32_t* rows[kMaxTileQueries];
  for (size_t i = 0; i < num_queries; ++i) {
    const size_t begin = ranges[i].begin / 32 * 32;
    if (begin < ranges[i].end) {
      PackWeights(weights[i] + begin, RoundUp(ranges[i].end - begin, 32),
                  packed[i] + begin / 2);
    }
    rows[i] = packed[i];
  }
  ForChunks<kMaxAccumulators / 2>(
      num_queries, addresses.next != nullptr,
      [&]<size_t kQueries, bool kAhead>(size_t i) GKV_INLINE_ATTR {
        PairsOfChunk<kQueries, kAhead>(addresses, ranges + i, weights + i,
                                       rows + i, head_dim,
                                       sums + i * sums_stride, sums_stride);
      });
}

// The values of a whole span, which all queries see, joined with their states:
// PairValues and a merge without a partial in between.
HWY_NOINLINE void JoinPairValues(const SpanAddresses& addresses,
                                 size_t num_queries,
                                 const float (*weights)[kAttentionSpan],
                                 size_t head_dim, const JoinedSums& joined) {
  constexpr size_t kPairs = kAttentionSpan / 2;
  HWY_ALIGN uint32_t packed[kMaxTileQueries][kPairs];
  const uint32_t* rows[kMaxTileQueries] = {};
  for (size_t i = 0; i < num_queries; ++i) {
    PackWeights(weights[i], kAttentionSpan, packed[i]);
    rows[i] = packed[i];
  }
  const uint8_t* const* next =
      addresses.next == nullptr ? nullptr : addresses.next->values;
  ForChunks<kMaxAccumulators / 2>(
      num_queries, next != nullptr,
      [&]<size_t kQueries, bool kAhead>(size_t i) GKV_INLINE_ATTR {
        AddPairs<kQueries, kAhead>(
            addresses.values, next, rows + i, 0, kPairs, head_dim,
            JoinedSums{joined.states + i * joined.stride, joined.stride,
                       joined.kept + i, joined.added + i});
      });
}
#else
#define GKV_NATIVE_PAIRS 0
#endif

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_ATTENTION_BF16_INL_H_
