#ifndef GEMMAKV_BASE_OWN_PROCESS_H_
#define GEMMAKV_BASE_OWN_PROCESS_H_

#include <atomic>
#include <cstdint>

namespace gkv {

// Remembers which process made an object. A child of fork() has a copy of the
// object, but the object's threads stayed in the parent. InChild() takes one
// load, since every parallel loop calls it; getpid() is a system call. A child
// is not noticed if it was made without the C library, by a bare system call.
class OwnProcess {
 public:
  OwnProcess() noexcept : forks_(Forks()) {}

  // Whether this process is a child of the one that made the object.
  bool InChild() const noexcept { return forks_ != Forks(); }

 private:
  static uint32_t Forks() noexcept {
    return count_.load(std::memory_order_relaxed);
  }

  // The number of fork()s between the first process and this one.
  static std::atomic<uint32_t> count_;

  uint32_t forks_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_OWN_PROCESS_H_
