#ifndef GEMMAKV_BASE_OWN_PROCESS_H_
#define GEMMAKV_BASE_OWN_PROCESS_H_

#include <atomic>
#include <cstdint>

namespace gkv {

// The process that made an object. A child of fork() has a copy of the object,
// whose threads stayed in the parent. To ask takes one load, where getpid() is a
// call of the system: a parallel loop asks. A child that was made past the C
// library, by a bare call of the system, is not noticed.
class OwnProcess {
 public:
  OwnProcess() noexcept : forks_(Forks()) {}

  // Whether this process is not that one, but came of it by fork().
  bool InChild() const noexcept { return forks_ != Forks(); }

 private:
  static uint32_t Forks() noexcept {
    return count_.load(std::memory_order_relaxed);
  }

  // How many fork()s lie between this process and the first one.
  static std::atomic<uint32_t> count_;

  uint32_t forks_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_OWN_PROCESS_H_
