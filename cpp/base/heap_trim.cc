#include "base/heap_trim.h"

#include <cstdlib>  // defines __GLIBC__ where it applies

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace gkv {
namespace {

// The C library keeps freed memory for itself; after so many bytes it is told
// to give it to the system. Takes about a millisecond.
constexpr size_t kTrimBytes = size_t{32} << 20;

}  // namespace

void TrimHeap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void HeapTrimmer::Freed(size_t bytes) noexcept {
  const size_t before = untrimmed_bytes_.fetch_add(bytes);
  if (before + bytes < kTrimBytes) return;
  untrimmed_bytes_ = 0;
  TrimHeap();
}

}  // namespace gkv
