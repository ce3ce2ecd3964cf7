// Weighted sums of values, both in bf16. Included once per Highway target.
//
// Weights are rounded to bf16, too, so that processors that have an instruction
// for it take two positions at once:
//   sum = fma(weight, value, sum) of the first, then of the second,
// where numbers too small to be normal count as zero, before and after each.
// That is what SumTokens makes of such weights on a thread that counts so.

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

// SumRounded on a thread that counts small numbers as zero. An odd position at
// the end has a partner of weight and value zero, which makes a negative zero
// positive.
HWY_NOINLINE void SumFlushed(const ValueTask& task, const PartialSums& sums) {
  SumTokens<FormatBF16>(task, sums);
  const DF32 d;
  for (size_t i = 0; i < task.num_queries; ++i) {
    if (task.ranges[i].end % 2 == 0) continue;
    for (size_t k = 0; k < task.head_dim; k += kLanes) {
      sums.End(i, k, hn::Add(sums.Begin(i, k), hn::Zero(d)));
    }
  }
}

// SumTokens of weights that are bf16.
HWY_NOINLINE void SumRounded(const ValueTask& task, const PartialSums& sums) {
  const ScopedFlushToZero flush;
  SumFlushed(task, sums);
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

// The values of bf16 in pairs. A row is two positions, the first of which is
// even.
struct PairRows {
  using Vector = Pair;
  static constexpr size_t kTokens = 2;  // of a row
  static constexpr size_t kPairs = kAttentionSpan / kTokens;

  const uint8_t* const* tokens;
  const uint8_t* const* next;  // those of the next span, or null
  const uint32_t* weights;     // [queries, kPairs], packed

  HWY_INLINE PairRows From(size_t query) const {
    return {tokens, next, weights + query * kPairs};
  }
  template <size_t kDims>
  HWY_INLINE void Fetch(size_t row, size_t at) const {
    for (size_t i = 0; i < kTokens; ++i) {
      FetchLines(next[kTokens * row + i] + at * sizeof(uint16_t),
                 kDims * sizeof(uint16_t));
    }
  }
  HWY_INLINE Pair Load(size_t row, size_t at) const {
    const uint8_t* const* both = tokens + kTokens * row;
    return LoadPair(reinterpret_cast<const uint16_t*>(both[0]) + at,
                    reinterpret_cast<const uint16_t*>(both[1]) + at);
  }
  HWY_INLINE Pair Weight(size_t query, size_t row) const {
    return hn::BitCast(DU16(), hn::Set(DU32(), weights[query * kPairs + row]));
  }
  static HWY_INLINE VF32 Add(Pair weights, Pair values, VF32 sum) {
    return VF32{
        _mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(weights.raw),
                         reinterpret_cast<__m512bh>(values.raw))};
  }
  // Adds the only token of a pair that a query sees.
  HWY_INLINE void AddHalf(size_t query, size_t token, size_t head_dim,
                          const PartialSums& sums) const {
    const auto* unseen = reinterpret_cast<const uint8_t*>(kUnseen);
    const uint8_t* both[kTokens] = {unseen, unseen};
    both[token % kTokens] = tokens[token];
    const uint32_t weight = weights[query * kPairs + token / kTokens] &
                            (token % kTokens == 0 ? 0xFFFF0000u : 0xFFFFu);
    AddValues<1>(PairRows{both, nullptr, &weight}, 0, 1, head_dim, sums);
  }
};

// `weights` are packed.
HWY_INLINE PairRows PairsOf(const SpanAddresses& addresses,
                            const uint32_t* weights) {
  const SpanAddresses* next = addresses.next;
  return {addresses.values, next == nullptr ? nullptr : next->values, weights};
}

// Sums of a whole span's values, joined with those of earlier spans as
// MergeImpl does it, but without a partial in between.
struct JoinedSums {
  static constexpr bool kOfWholeSpans = true;

  float* states;
  size_t stride;
  const float* kept;   // of each query, the factor of what is there
  const float* added;  // and of what comes to it

  HWY_INLINE JoinedSums From(size_t query) const {
    return {states + query * stride, stride, kept + query, added + query};
  }
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

// SumRounded by the instruction, which counts small numbers as zero by itself.
template <class Sums>
HWY_NOINLINE void SumPairs(const ValueTask& task, const Sums& sums) {
  HWY_ALIGN uint32_t packed[kMaxTileQueries * PairRows::kPairs];
  for (size_t i = 0; i < task.num_queries; ++i) {
    const TokenRange& range = task.ranges[i];
    const size_t begin = range.begin / 32 * 32;
    if (begin < range.end) {
      PackWeights(task.weights[i] + begin, RoundUp(range.end - begin, 32),
                  packed + i * PairRows::kPairs + begin / 2);
    }
  }
  SumRows(PairsOf(task.addresses, packed), task, sums);
}
#else
#define GKV_NATIVE_PAIRS 0
#endif

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#endif  // GEMMAKV_OPS_ATTENTION_BF16_INL_H_
