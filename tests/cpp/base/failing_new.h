#ifndef GEMMAKV_TESTS_BASE_FAILING_NEW_H_
#define GEMMAKV_TESTS_BASE_FAILING_NEW_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

// Memory that runs out where a test wants it to. Replaces operator new of the
// program: for the one source file of a test.

namespace gkv {

// While this is alive, `count` allocations of this thread fail, from the n-th
// (1 = the next) on.
class FailingNew {
 public:
  explicit FailingNew(size_t n, size_t count = SIZE_MAX / 2) {
    at_ = 0;
    first_ = n;
    end_ = n + count;
  }
  ~FailingNew() { first_ = end_ = 0; }
  FailingNew(const FailingNew&) = delete;

  static bool Fails() {
    ++at_;
    return first_ <= at_ && at_ < end_;
  }

 private:
  static inline thread_local size_t at_ = 0, first_ = 0, end_ = 0;
};

}  // namespace gkv

[[gnu::noinline]] void* operator new(size_t size,
                                     const std::nothrow_t&) noexcept {
  return gkv::FailingNew::Fails() ? nullptr : std::malloc(size);
}

[[gnu::noinline]] void* operator new(size_t size) {
  void* const memory = ::operator new(size, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

#endif  // GEMMAKV_TESTS_BASE_FAILING_NEW_H_
