#include "io/file_access.h"

#include <sys/resource.h>
#include <unistd.h>

namespace gkv {

int WriteFileAt(int file, uint64_t offset,
                std::span<const uint8_t> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t written = Uninterrupted([&] {
      return pwrite(file, bytes.data(), bytes.size(),
                    static_cast<off_t>(offset));
    });
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    offset += static_cast<uint64_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return 0;
}

int ReadFileAt(int file, uint64_t offset, std::span<uint8_t> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t found = Uninterrupted([&] {
      return pread(file, bytes.data(), bytes.size(),
                   static_cast<off_t>(offset));
    });
    if (found <= 0) return found < 0 ? errno : EIO;
    offset += static_cast<uint64_t>(found);
    bytes = bytes.subspan(static_cast<size_t>(found));
  }
  return 0;
}

bool MayBeWritten(uint64_t size) noexcept {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
         limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur;
}

}  // namespace gkv
