#include "base/process.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace gkv {

uint32_t UserId() noexcept { return geteuid(); }

uint64_t MemoryLimit() {
  uint64_t limit = static_cast<uint64_t>(PageBytes()) *
                   static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  for (const char* path : {"/sys/fs/cgroup/memory.max",
                           "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    uint64_t found = 0;
    if (std::ifstream(path) >> found) limit = std::min(limit, found);
  }
  return limit;
}

size_t ProcessorCacheBytes(int level) noexcept {
  const int name = level == 1   ? _SC_LEVEL1_DCACHE_SIZE
                   : level == 2 ? _SC_LEVEL2_CACHE_SIZE
                                : _SC_LEVEL3_CACHE_SIZE;
  return static_cast<size_t>(std::max(0L, sysconf(name)));
}

size_t PageBytes() noexcept {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace gkv
