#ifndef GEMMAKV_BASE_ROUNDING_H_
#define GEMMAKV_BASE_ROUNDING_H_

#include <concepts>
#include <type_traits>

namespace gkv {

// Returns value / unit, rounded up. Requires: unit > 0; value + unit - 1 fits.
template <std::unsigned_integral T>
constexpr T CeilDiv(T value, std::type_identity_t<T> unit) {
  return static_cast<T>((value + unit - 1) / unit);
}

// Returns the least multiple of `unit` that is not below `value`. Requires: as
// above.
template <std::unsigned_integral T>
constexpr T RoundUp(T value, std::type_identity_t<T> unit) {
  return static_cast<T>(CeilDiv(value, unit) * unit);
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_ROUNDING_H_
