#ifndef GEMMAKV_KV_DTYPE_H_
#define GEMMAKV_KV_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace gkv {

// The storage format of keys and values. Attention reads the stored bytes, even
// for tokens of the running step.
enum class KvDtype : uint32_t {
  kF32 = 0,
  kBF16 = 1,
  kInt8 = 2,  // one f32 scale per 32 values within a head
};

// Returns the bytes of one stored number, without scales.
constexpr size_t ElementBytes(KvDtype dtype) {
  return dtype == KvDtype::kF32 ? 4 : dtype == KvDtype::kBF16 ? 2 : 1;
}

}  // namespace gkv

#endif  // GEMMAKV_KV_DTYPE_H_
