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

// Returns what an error says about an argument that has a value which it cannot
// have: "NAME: expected EXPECTED, found FOUND".
template <typename Name, typename Expected, typename Found>
std::string Unexpected(const Name& name, const Expected& expected,
                       const Found& found) {
  return StrCat(name, ": expected ", expected, ", found ", found);
}

// Throws E unless low <= value <= high: "NAME: expected LOW..HIGH, found
// VALUE", with NAME from the printed forms of `name`.
template <class E = InvalidArgument, typename... Name>
void CheckRange(uint64_t value, uint64_t low, uint64_t high,
                const Name&... name) {
  if (value >= low && value <= high) return;
  throw E(Unexpected(StrCat(name...), StrCat(low, "..", high), value));
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_ERROR_H_
