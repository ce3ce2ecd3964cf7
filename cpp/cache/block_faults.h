#ifndef GEMMAKV_CACHE_BLOCK_FAULTS_H_
#define GEMMAKV_CACHE_BLOCK_FAULTS_H_

#include <atomic>
#include <cstddef>
#include <cstring>

#include "cache/block.h"

// Faults that tests inject into a pool. Safe from any thread.

namespace gkv {

// Fills blocks with 0xFF bytes (NaN in f32, bf16 and the scales of int8), so
// that any read of an unwritten position shows. It is on from the start in
// builds with assertions or sanitizers.
class BlockPoison {
 public:
  void set_on(bool on) { on_ = on; }
  void Fill(Block& block) const noexcept {
    if (on_) std::memset(block.data, 0xFF, block.size_bytes);
  }

 private:
#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
  std::atomic<bool> on_ = true;
#else
  std::atomic<bool> on_ = false;
#endif
};

// Says when a call is to fail.
class FailureInjector {
 public:
  // Makes the n-th Fails() from now (1 = the next) true. 0: none.
  void FailAfter(size_t n) { left_ = n; }
  bool Fails() noexcept {
    size_t left = left_;
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1)) {
    }
    return left == 1;
  }

 private:
  std::atomic<size_t> left_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_BLOCK_FAULTS_H_
