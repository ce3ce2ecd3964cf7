#ifndef GEMMAKV_TESTS_BASE_SANITIZED_H_
#define GEMMAKV_TESTS_BASE_SANITIZED_H_

namespace gkv {

// Everything takes ten times as long then: tests that repeat something repeat
// it less often.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace gkv

#endif  // GEMMAKV_TESTS_BASE_SANITIZED_H_
