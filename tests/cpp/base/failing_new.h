#ifndef GEMMAKV_TESTS_BASE_FAILING_NEW_H_
#define GEMMAKV_TESTS_BASE_FAILING_NEW_H_

#include <cstddef>
#include <cstdlib>
#include <new>

// Memory that runs out where a test wants it to. Replaces operator new of the
// program: for the one source file of a test.

namespace gkv {

inline thread_local size_t failing_new_countdown = 0;

// While this is alive, the n-th allocation of this thread (1 = the next) throws
// std::bad_alloc.
class FailingNew {
 public:
  explicit FailingNew(size_t n) { failing_new_countdown = n; }
  ~FailingNew() { failing_new_countdown = 0; }
  FailingNew(const FailingNew&) = delete;
};

}  // namespace gkv

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  size_t& countdown = gkv::failing_new_countdown;
  if (countdown > 0 && --countdown == 0) return nullptr;
  return std::malloc(size);
}

void* operator new(size_t size) {
  void* const memory = ::operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#endif  // GEMMAKV_TESTS_BASE_FAILING_NEW_H_
