#ifndef GEMMAKV_BASE_FORK_GUARD_H_
#define GEMMAKV_BASE_FORK_GUARD_H_

#include <mutex>

namespace gkv {

// Keeps a mutex out of fork(): the process is copied while nobody holds it, so
// that a child finds what it guards whole, and may lock it. For mutexes that
// are held for moments, and by nobody who forks.
class ForkGuard {
 public:
  // The mutex outlives it. Throws std::bad_alloc.
  explicit ForkGuard(std::mutex& mutex);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

 private:
  std::mutex& mutex_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_FORK_GUARD_H_
