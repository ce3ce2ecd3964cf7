#ifndef GEMMAKV_BASE_ERROR_H_
#define GEMMAKV_BASE_ERROR_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "gemmakv/error.h"

// How the core words and throws its errors.

namespace gkv {

// Returns `text` with control characters, and bytes that are not UTF-8, written
// as "\x0a". Names from files and arguments can hold anything.
std::string OneLine(std::string_view text);

// Concatenates the printed forms of its arguments.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// Throws E unless low <= value <= high: "NAME is VALUE, expected LOW..HIGH",
// with NAME from the printed forms of `name`.
template <class E = InvalidArgument, typename... Name>
void CheckRange(uint64_t value, uint64_t low, uint64_t high,
                const Name&... name) {
  if (value >= low && value <= high) return;
  throw E(StrCat(name..., " is ", value, ", expected ", low, "..", high));
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_ERROR_H_
