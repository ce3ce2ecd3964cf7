#ifndef GEMMAKV_OPS_KV_STRIP_H_
#define GEMMAKV_OPS_KV_STRIP_H_

#include <cstddef>
#include <cstdint>

#include "gemmakv/kv_dtype.h"

// A strip holds the keys or the values of one kv head of one layer for a whole
// number of token groups. Groups of kKvGroup tokens keep the layout the same on
// every SIMD target:
//   keys    [tokens / 16][head_dim][16]   a lane owns a token: dot products
//                                         walk head_dim in order, no horizontal
//                                         sums
//   values  [tokens][head_dim]            a lane owns a dimension
// kInt8 strips hold the int8 values in the same order, followed by their f32
// scales: keys [tokens / 16][head_dim / 32][16], values [tokens][head_dim /
// 32].

namespace gkv {

inline constexpr size_t kKvGroup = 16;
inline constexpr size_t kKvInt8Block = 32;

// Returns the bytes of a key strip, which are those of a value strip.
// Requires: tokens % kKvGroup == 0; head_dim % 32 == 0.
size_t KvStripBytes(KvDtype dtype, size_t tokens, size_t head_dim);

// Stores one token's key or value: rounds `x` [head_dim] to `dtype` into token
// `index` of a strip of `strip_tokens` tokens. bf16 rounds to nearest even;
// int8 is round(x / scale) with scale = max |x| / 127 over 32 values.
void StoreKey(KvDtype dtype, const float* x, size_t head_dim, size_t index,
              size_t strip_tokens, uint8_t* strip);
void StoreValue(KvDtype dtype, const float* x, size_t head_dim, size_t index,
                size_t strip_tokens, uint8_t* strip);

// Read the stored numbers as floats, out [head_dim].
void LoadKey(KvDtype dtype, const uint8_t* strip, size_t head_dim, size_t index,
             size_t strip_tokens, float* out);
void LoadValue(KvDtype dtype, const uint8_t* strip, size_t head_dim,
               size_t index, size_t strip_tokens, float* out);

// Says which tokens go from one strip to another: [begin, end), to the places
// from `to_begin` on. Strips may hold different numbers of tokens. Requires:
// begin and to_begin have the same place within their groups.
struct StripCopy {
  KvDtype dtype;
  size_t head_dim;
  size_t begin, end;
  size_t to_begin;
  size_t from_tokens, to_tokens;  // sizes of the strips
};
// Copy the tokens and touch no byte of other tokens in either strip: another
// thread may be writing those.
void CopyKeys(const StripCopy& copy, const uint8_t* from, uint8_t* to);
void CopyValues(const StripCopy& copy, const uint8_t* from, uint8_t* to);

}  // namespace gkv

#endif  // GEMMAKV_OPS_KV_STRIP_H_
