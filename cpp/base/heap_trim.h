#ifndef GEMMAKV_BASE_HEAP_TRIM_H_
#define GEMMAKV_BASE_HEAP_TRIM_H_

#include <cstddef>

namespace gkv {

// Gives memory that was allocated and freed back to the system where the C
// library keeps it (glibc); elsewhere nothing needs doing. Loading a model
// frees several MB of small pieces (vocabulary, metadata) that would count as
// resident for as long as the process lives. Milliseconds; any thread.
void TrimHeap();

// Gives the whole pages of a piece of memory back to the system. The piece is
// about to be freed: its content is lost. This takes time for the size of the
// piece alone. Trimming looks at the whole heap, which other parts of the
// program use as well, and their threads wait meanwhile: 0.2 s where a million
// pieces are free. Any thread.
void GiveBack(void* data, size_t bytes) noexcept;

}  // namespace gkv

#endif  // GEMMAKV_BASE_HEAP_TRIM_H_
