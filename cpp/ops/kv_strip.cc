#include "ops/kv_strip.h"

#include <algorithm>
#include <cstring>

#include "base/float16.h"
#include "ops/quantize.h"

namespace gkv {
namespace {

static_assert(kKvInt8Block == kQuantBlock);

// Returns the index of a key's first element. The others follow at stride
// kKvGroup.
size_t KeyAt(size_t index, size_t head_dim) {
  return index / kKvGroup * head_dim * kKvGroup + index % kKvGroup;
}

// Scales of an int8 strip follow its values.
float* Scales(uint8_t* strip, size_t tokens, size_t head_dim) {
  return reinterpret_cast<float*>(strip + tokens * head_dim);
}
const float* Scales(const uint8_t* strip, size_t tokens, size_t head_dim) {
  return reinterpret_cast<const float*>(strip + tokens * head_dim);
}

// Element i of a stored vector lies at `at` + i * `stride`; its scale, for
// int8, at `scale_at` + i / 32 * `stride`.
struct Place {
  size_t at;
  size_t stride;
  size_t scale_at;
};

Place KeyPlace(size_t index, size_t head_dim) {
  return {KeyAt(index, head_dim), kKvGroup,
          KeyAt(index, head_dim / kKvInt8Block)};
}

Place ValuePlace(size_t index, size_t head_dim) {
  return {index * head_dim, 1, index * (head_dim / kKvInt8Block)};
}

void Store(KvDtype dtype, const float* x, size_t head_dim, const Place& place,
           size_t strip_tokens, uint8_t* strip) {
  switch (dtype) {
    case KvDtype::kF32: {
      float* out = reinterpret_cast<float*>(strip) + place.at;
      for (size_t i = 0; i < head_dim; ++i) out[i * place.stride] = x[i];
      break;
    }
    case KvDtype::kBF16: {
      uint16_t* out = reinterpret_cast<uint16_t*>(strip) + place.at;
      for (size_t i = 0; i < head_dim; ++i) {
        out[i * place.stride] = BFloat16FromFloat32(x[i]);
      }
      break;
    }
    case KvDtype::kInt8: {
      int8_t* out = reinterpret_cast<int8_t*>(strip) + place.at;
      float* scales = Scales(strip, strip_tokens, head_dim) + place.scale_at;
      int8_t block[kKvInt8Block];
      int32_t sum;
      for (size_t b = 0; b < head_dim / kKvInt8Block; ++b) {
        QuantizeRows(x + b * kKvInt8Block, 0, 1, kKvInt8Block,
                     {block, &scales[b * place.stride], &sum});
        for (size_t i = 0; i < kKvInt8Block; ++i) {
          out[(b * kKvInt8Block + i) * place.stride] = block[i];
        }
      }
      break;
    }
  }
}

void Load(KvDtype dtype, const uint8_t* strip, size_t head_dim,
          const Place& place, size_t strip_tokens, float* out) {
  for (size_t i = 0; i < head_dim; ++i) {
    const size_t at = place.at + i * place.stride;
    switch (dtype) {
      case KvDtype::kF32:
        out[i] = reinterpret_cast<const float*>(strip)[at];
        break;
      case KvDtype::kBF16:
        out[i] =
            Float32FromBFloat16(reinterpret_cast<const uint16_t*>(strip)[at]);
        break;
      case KvDtype::kInt8:
        out[i] =
            static_cast<float>(reinterpret_cast<const int8_t*>(strip)[at]) *
            Scales(strip, strip_tokens,
                   head_dim)[place.scale_at + i / kKvInt8Block * place.stride];
        break;
    }
  }
}

// Copies tokens of an array [tokens / 16][rows][16] of elements.
void CopyGrouped(const StripCopy& copy, size_t rows, size_t element,
                 const uint8_t* from, uint8_t* to) {
  const size_t row_bytes = kKvGroup * element;
  for (size_t p = copy.begin, count; p < copy.end; p += count) {
    const size_t first = p % kKvGroup;
    count = std::min(kKvGroup - first, copy.end - p);
    const size_t to_group = (p - copy.begin + copy.to_begin) / kKvGroup;
    const uint8_t* source = from + p / kKvGroup * rows * row_bytes;
    uint8_t* target = to + to_group * rows * row_bytes;
    if (count == kKvGroup) {
      std::memcpy(target, source, rows * row_bytes);
      continue;
    }
    for (size_t row = 0; row < rows; ++row) {
      const size_t at = row * row_bytes + first * element;
      std::memcpy(target + at, source + at, count * element);
    }
  }
}

// Copies tokens of an array [tokens] of `row` bytes each.
void CopyRows(const StripCopy& copy, size_t row, const uint8_t* from,
              uint8_t* to) {
  std::memcpy(to + copy.to_begin * row, from + copy.begin * row,
              (copy.end - copy.begin) * row);
}

}  // namespace

size_t KvStripBytes(KvDtype dtype, size_t tokens, size_t head_dim) {
  size_t bytes = tokens * head_dim * ElementBytes(dtype);
  if (dtype == KvDtype::kInt8) {
    bytes += tokens * (head_dim / kKvInt8Block) * sizeof(float);
  }
  return bytes;
}

void StoreKey(KvDtype dtype, const float* x, size_t head_dim, size_t index,
              size_t strip_tokens, uint8_t* strip) {
  Store(dtype, x, head_dim, KeyPlace(index, head_dim), strip_tokens, strip);
}

void StoreValue(KvDtype dtype, const float* x, size_t head_dim, size_t index,
                size_t strip_tokens, uint8_t* strip) {
  Store(dtype, x, head_dim, ValuePlace(index, head_dim), strip_tokens, strip);
}

void LoadKey(KvDtype dtype, const uint8_t* strip, size_t head_dim, size_t index,
             size_t strip_tokens, float* out) {
  Load(dtype, strip, head_dim, KeyPlace(index, head_dim), strip_tokens, out);
}

void LoadValue(KvDtype dtype, const uint8_t* strip, size_t head_dim,
               size_t index, size_t strip_tokens, float* out) {
  Load(dtype, strip, head_dim, ValuePlace(index, head_dim), strip_tokens, out);
}

void CopyKeys(const StripCopy& copy, const uint8_t* from, uint8_t* to) {
  const size_t head_dim = copy.head_dim;
  CopyGrouped(copy, head_dim, ElementBytes(copy.dtype), from, to);
  if (copy.dtype == KvDtype::kInt8) {
    CopyGrouped(copy, head_dim / kKvInt8Block, sizeof(float),
                from + copy.from_tokens * head_dim,
                to + copy.to_tokens * head_dim);
  }
}

void CopyValues(const StripCopy& copy, const uint8_t* from, uint8_t* to) {
  const size_t head_dim = copy.head_dim;
  CopyRows(copy, head_dim * ElementBytes(copy.dtype), from, to);
  if (copy.dtype == KvDtype::kInt8) {
    CopyRows(copy, head_dim / kKvInt8Block * sizeof(float),
             from + copy.from_tokens * head_dim,
             to + copy.to_tokens * head_dim);
  }
}

}  // namespace gkv
