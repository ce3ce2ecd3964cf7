#ifndef GEMMAKV_TESTS_CPP_BASE_FLUSH_TO_ZERO_H_
#define GEMMAKV_TESTS_CPP_BASE_FLUSH_TO_ZERO_H_

#include <cfenv>
#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gkv {

// What other libraries do to a thread: flush-to-zero, denormals-are-zero.
class FlushToZero {
 public:
#if defined(__SSE2__)
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushToZero() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
  FlushToZero() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | uint64_t{1} << 24));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#endif

 private:
#if defined(__SSE2__)
  unsigned saved_;
#else
  uint64_t saved_;
#endif
};

// The same, and rounding upward: no bit may depend on what a caller has set.
class OddFpEnvironment {
 public:
  OddFpEnvironment() { std::fesetround(FE_UPWARD); }
  ~OddFpEnvironment() { std::fesetround(FE_TONEAREST); }

 private:
  const FlushToZero flush_;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_BASE_FLUSH_TO_ZERO_H_
