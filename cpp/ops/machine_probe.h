#ifndef GEMMAKV_OPS_MACHINE_PROBE_H_
#define GEMMAKV_OPS_MACHINE_PROBE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"

namespace gkv {

// Measures what this machine can do at most, with a number of threads and on
// the current SIMD target. The speed of kernels and models is then a share of
// that. Each call measures anew for some tens of milliseconds and returns the
// best of a few runs. On a shared machine, measure right before what is
// compared. Not thread-safe.
class MachineProbe {
 public:
  // Holds a buffer several times larger than the caches (128 MB to 1 GB).
  // Throws what ThreadPool and AlignedBuffer throw.
  explicit MachineProbe(size_t num_threads);

  // The rate of reading memory: sequentially, in several streams, with nothing
  // else to do.
  double ReadBytesPerSecond();
  // Dot products of 8-bit integers on registers, as the kernels of quantized
  // weights use them; a multiplication and an addition are two operations.
  double Int8OpsPerSecond();
  // Float multiply-adds on registers, two operations each.
  double FloatOpsPerSecond();

 private:
  ThreadPool pool_;
  AlignedBuffer<uint8_t> buffer_;
};

// Returns the exclusive or of all bytes as 64-bit words: the probe's work of
// reading, here for its test. Requires: bytes.size() % 1024 == 0.
uint64_t XorSum(std::span<const uint8_t> bytes);

}  // namespace gkv

#endif  // GEMMAKV_OPS_MACHINE_PROBE_H_
