#ifndef GEMMAKV_OPS_QUANTIZE_WEIGHTS_H_
#define GEMMAKV_OPS_QUANTIZE_WEIGHTS_H_

#include <cstddef>
#include <cstdint>

#include "gemmakv/tensor_type.h"

namespace gkv {

// Converts `count` weights of type `from` (F32, F16 or BF16) to another type.
// Pure and thread-safe; the same bits on every target, and those of the GGUF
// reference quantizers:
//
//   Q8_0   d = max|x| / 127, q = x * (1 / d) rounded, halves away from zero
//   Q5_0   d = m / -16, q = min(31, floor(x * (1 / d) + 16.5)), where m is the
//          block's first value of the largest magnitude
//   Q4_0   d = m / -8, q = min(15, floor(x * (1 / d) + 8.5))
//   BF16   rounded to nearest, ties to even
//
// in single precision, with one rounding per operation; d is stored as
// binary16. If a block is so small (|d| < 2^-128) that 1 / d is not finite, its
// values are all quantized as zero.
//
// Returns false if a value is NaN or infinite, or if a block's d, or a value
// as BF16, would be infinite; `out` is then undefined.
// Requires: `to` is one of the above and not `from`; the thread is in the IEEE
// environment (base/fp_environment.h); count % Info(to).values == 0. Neither
// pointer needs alignment.
[[nodiscard]] bool QuantizeWeights(TensorType from, const uint8_t* source,
                                   size_t count, TensorType to, uint8_t* out);

}  // namespace gkv

#endif  // GEMMAKV_OPS_QUANTIZE_WEIGHTS_H_
