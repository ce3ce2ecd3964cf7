#ifndef GEMMAKV_BASE_FORK_GUARD_H_
#define GEMMAKV_BASE_FORK_GUARD_H_

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <shared_mutex>

namespace gkv {

// Keeps a mutex out of fork(): the process is copied while nobody holds it, so
// that a child finds what it guards whole, and may lock it. For mutexes that
// are held for moments, and by nobody who forks, or who waits for one that
// forks.
class ForkGuard {
 public:
  // The mutex outlives it. `changed` is what threads wait on with the mutex, if
  // there is such a thing: a child, which has none of these threads, begins
  // with a new one.
  explicit ForkGuard(std::mutex& mutex,
                     std::condition_variable* changed = nullptr);
  explicit ForkGuard(std::shared_mutex& mutex);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // How often a fork() has found a mutex held, and has waited. For tests.
  static size_t waits() noexcept;

 private:
  friend struct GuardedMutexes;
  void Enter();
  bool TryLock() const;
  void Unlock() const;
  void RenewInChild() const;

  std::mutex* const mutex_ = nullptr;  // or the other one
  std::shared_mutex* const shared_mutex_ = nullptr;
  std::condition_variable* const changed_ = nullptr;
  // Neighbours in the list of all; also of guards that are const.
  mutable const ForkGuard* before_ = nullptr;
  mutable const ForkGuard* after_ = nullptr;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_FORK_GUARD_H_
