#ifndef GEMMAKV_BASE_UNALIGNED_H_
#define GEMMAKV_BASE_UNALIGNED_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gkv {

// The T whose bytes are from `at` on, wherever that is.
template <typename T>
T LoadUnaligned(const uint8_t* at) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_UNALIGNED_H_
