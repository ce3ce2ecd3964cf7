#ifndef GEMMAKV_BASE_PROCESS_H_
#define GEMMAKV_BASE_PROCESS_H_

#include <cstddef>
#include <cstdint>

// Facts about this process and its machine, as the system tells them.

namespace gkv {

// The user whose rights this process has, as files name their owners.
uint32_t UserId() noexcept;

// Bytes of memory that this process may use: the machine's, or fewer that its
// control group has.
uint64_t MemoryLimit();

// Bytes of the cache of data of `level` 1, 2 or 3 that a core has or shares; 0
// if the system does not say.
size_t ProcessorCacheBytes(int level) noexcept;

// Bytes of a page of memory.
size_t PageBytes() noexcept;

}  // namespace gkv

#endif  // GEMMAKV_BASE_PROCESS_H_
