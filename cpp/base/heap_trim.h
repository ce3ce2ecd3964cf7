#ifndef GEMMAKV_BASE_HEAP_TRIM_H_
#define GEMMAKV_BASE_HEAP_TRIM_H_

#include <cstddef>

namespace gkv {

// Gives memory that was allocated and freed back to the system where the C
// library keeps it (glibc); elsewhere nothing needs doing. Loading a model
// frees several MB of small pieces (vocabulary, metadata) that would count as
// resident for as long as the process lives. Milliseconds; any thread.
void TrimHeap();

// Gives the whole pages of a piece of memory back to the system, which is about
// to be freed: its content is lost. Takes as long as that piece is large, where
// trimming looks at all of the heap, which may be another program's, while all
// its threads wait: 0.2 s where a million pieces are free. Any thread.
void GiveBack(void* data, size_t bytes) noexcept;

}  // namespace gkv

#endif  // GEMMAKV_BASE_HEAP_TRIM_H_
