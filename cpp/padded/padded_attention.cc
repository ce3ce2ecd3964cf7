#include "padded/padded_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "padded/padded_attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/attention-inl.h"
#include "ops/attention_span.h"

HWY_BEFORE_NAMESPACE();
namespace gkv {
namespace HWY_NAMESPACE {

SpanKernels FloatWeights() {
  return {SpanPartial<FormatBF16, false, SumTokens<FormatBF16>>};
}

}  // namespace HWY_NAMESPACE
}  // namespace gkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace gkv {

HWY_EXPORT(FloatWeights);

void PaddedAttentionTile(const KvHeadView& kv, const QueryTile& tile,
                         float* scratch, float* const* out) {
  if (kv.dtype == KvDtype::kF32) return AttentionTile(kv, tile, scratch, out);
  AttentionTileBy(HWY_DYNAMIC_DISPATCH(FloatWeights)(), kv, tile, scratch, out);
}

}  // namespace gkv

#endif  // HWY_ONCE
