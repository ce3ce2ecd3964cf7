#ifndef GEMMAKV_IO_FILE_ACCESS_H_
#define GEMMAKV_IO_FILE_ACCESS_H_

#include <cerrno>
#include <cstdint>
#include <span>

namespace gkv {

// `call` of the system again for as long as a signal interrupts it.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// 0, or the errno value of what failed. Thread-safe.
[[nodiscard]] int WriteFileAt(int file, uint64_t offset,
                              std::span<const uint8_t> bytes) noexcept;
// The same; EIO if the file ends before.
[[nodiscard]] int ReadFileAt(int file, uint64_t offset,
                             std::span<uint8_t> bytes) noexcept;

// Whether a file may become so large: writing beyond this process's limit would
// be a signal, not an error.
[[nodiscard]] bool MayBeWritten(uint64_t size) noexcept;

}  // namespace gkv

#endif  // GEMMAKV_IO_FILE_ACCESS_H_
