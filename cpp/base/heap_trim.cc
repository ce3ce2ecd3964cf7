#include "base/heap_trim.h"

#include <cstdint>
#include <cstdlib>  // defines __GLIBC__ where it applies

#ifdef __GLIBC__
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/rounding.h"
#endif

namespace gkv {

void TrimHeap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void GiveBack([[maybe_unused]] void* data,
              [[maybe_unused]] size_t bytes) noexcept {
#ifdef __GLIBC__
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const size_t skipped = RoundUp(address, page) - address;
  if (bytes < skipped + page) return;
  (void)madvise(static_cast<uint8_t*>(data) + skipped,
                (bytes - skipped) / page * page, MADV_DONTNEED);
#endif
}

}  // namespace gkv
