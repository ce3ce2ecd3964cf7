#ifndef GEMMAKV_PADDED_PADDED_ATTENTION_H_
#define GEMMAKV_PADDED_PADDED_ATTENTION_H_

#include "ops/attention.h"

namespace gkv {

// AttentionTile for padded caches: weights of bf16 values stay float32, as
// those who compare with NumPy expect. Requires: float32 or bf16.
void PaddedAttentionTile(const KvHeadView& kv, const QueryTile& tile,
                         float* scratch, float* const* out);

}  // namespace gkv

#endif  // GEMMAKV_PADDED_PADDED_ATTENTION_H_
