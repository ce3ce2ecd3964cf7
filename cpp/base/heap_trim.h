#ifndef GEMMAKV_BASE_HEAP_TRIM_H_
#define GEMMAKV_BASE_HEAP_TRIM_H_

#include <atomic>
#include <cstddef>

namespace gkv {

// Gives memory that was allocated and freed back to the system where the C
// library keeps it (glibc); elsewhere nothing needs doing. Loading a model
// frees several MB of small pieces (vocabulary, metadata) that would count as
// resident for as long as the process lives. Milliseconds; any thread.
void TrimHeap();

// Trims the heap whenever so many bytes were freed since the last time. Any
// thread.
class HeapTrimmer {
 public:
  void Freed(size_t bytes) noexcept;

 private:
  std::atomic<size_t> untrimmed_bytes_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_HEAP_TRIM_H_
