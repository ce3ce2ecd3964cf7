#include "base/fp_environment.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gkv {

#if defined(__SSE2__)

namespace {
// All exceptions masked, round to nearest, no flush-to-zero.
constexpr unsigned kDefaultMxcsr = 0x1F80;
}  // namespace

ScopedFpEnvironment::ScopedFpEnvironment() : saved_(_mm_getcsr()) {
  _mm_setcsr(kDefaultMxcsr);
}

ScopedFpEnvironment::~ScopedFpEnvironment() {
  _mm_setcsr(static_cast<unsigned>(saved_));
}

#elif defined(__aarch64__)

ScopedFpEnvironment::ScopedFpEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
}

ScopedFpEnvironment::~ScopedFpEnvironment() {
  asm volatile("msr fpcr, %0" : : "r"(saved_));
}

#else
#error "No floating-point control for this architecture."
#endif

}  // namespace gkv
