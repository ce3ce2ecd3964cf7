#ifndef GEMMAKV_BASE_HEAP_TRIM_H_
#define GEMMAKV_BASE_HEAP_TRIM_H_

namespace gkv {

// Gives memory that was allocated and freed back to the system where the C
// library keeps it (glibc); elsewhere nothing needs doing. Loading a model
// frees several MB of small pieces (vocabulary, metadata) that would count as
// resident for as long as the process lives. Milliseconds; any thread.
void TrimHeap();

}  // namespace gkv

#endif  // GEMMAKV_BASE_HEAP_TRIM_H_
