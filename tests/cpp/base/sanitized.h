#ifndef GEMMAKV_TESTS_BASE_SANITIZED_H_
#define GEMMAKV_TESTS_BASE_SANITIZED_H_

namespace gkv {

// Everything takes ten times as long then, and what is looked for is misuse of
// memory and of threads: tests that repeat something repeat it less often, and
// those that compare results compare fewer. CheckedFamilies() and TypesAround()
// of model/tiny_model.h say with which models.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

}  // namespace gkv

#endif  // GEMMAKV_TESTS_BASE_SANITIZED_H_
