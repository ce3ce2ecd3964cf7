#ifndef GEMMAKV_TESTS_CPP_BASE_SAYS_H_
#define GEMMAKV_TESTS_CPP_BASE_SAYS_H_

#include <gtest/gtest.h>

#include <initializer_list>
#include <string_view>

namespace gkv {

// Whether a message has all of these parts: what was found and expected, not the
// words around it.
inline ::testing::AssertionResult Says(
    std::string_view message, std::initializer_list<std::string_view> parts) {
  for (const std::string_view part : parts) {
    if (message.find(part) == std::string_view::npos) {
      return ::testing::AssertionFailure()
             << "found \"" << message << "\", expected \"" << part << "\" in it";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_BASE_SAYS_H_
