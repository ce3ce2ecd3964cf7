#ifndef GEMMAKV_BASE_BYTES_H_
#define GEMMAKV_BASE_BYTES_H_

#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <type_traits>

namespace gkv {

// Whether a T has no padding, so that its bytes are its value.
template <typename T>
inline constexpr bool kIsPlain = std::is_floating_point_v<T> ||
                                 std::has_unique_object_representations_v<T>;

// Returns the T whose bytes begin at `at`, which may be unaligned.
template <typename T>
T LoadUnaligned(const uint8_t* at) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// The bytes of the elements of a contiguous range.
template <typename Range>
std::span<const uint8_t> AsBytes(const Range& range) {
  return {reinterpret_cast<const uint8_t*>(std::data(range)),
          std::size(range) * sizeof(*std::data(range))};
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_BYTES_H_
