#ifndef GEMMAKV_BASE_PROCESS_H_
#define GEMMAKV_BASE_PROCESS_H_

#include <cstddef>
#include <cstdint>

// Facts about this process and its machine, as the system tells them.

namespace gkv {

// Returns the id of the user whose rights this process has.
uint32_t UserId() noexcept;

// Returns the bytes of memory that this process may use: those of the machine,
// or the limit of its control group if that is lower.
uint64_t MemoryLimit();

// Returns the bytes of the data cache of `level` 1, 2 or 3 that a core has or
// shares; 0 if the system does not say.
size_t ProcessorCacheBytes(int level) noexcept;

// Returns the bytes of a page of memory.
size_t PageBytes() noexcept;

}  // namespace gkv

#endif  // GEMMAKV_BASE_PROCESS_H_
