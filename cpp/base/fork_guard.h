#ifndef GEMMAKV_BASE_FORK_GUARD_H_
#define GEMMAKV_BASE_FORK_GUARD_H_

#include <array>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <shared_mutex>

namespace gkv {

// Keeps mutexes out of fork(): the process is copied while nobody holds them, so
// that a child finds what they guard whole, and may lock them. For mutexes that
// are held for moments, and by nobody who forks, or who waits for one that
// forks.
//
// All guards are in one list. To enter and leave it takes 50 ns, so an object
// that is made as often as a conversation has one guard for all its mutexes.
class ForkGuard {
 public:
  using Mutexes = std::array<std::mutex*, 3>;  // null: none

  // The mutex outlives it. `changed` is what threads wait on with the mutex, if
  // there is such a thing: a child, which has none of these threads, begins
  // with a new one.
  explicit ForkGuard(std::mutex& mutex,
                     std::condition_variable* changed = nullptr)
      : ForkGuard(Mutexes{&mutex}, changed) {}
  explicit ForkGuard(const Mutexes& mutexes,
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

  const Mutexes mutexes_ = {};
  std::shared_mutex* const shared_mutex_ = nullptr;  // or these
  std::condition_variable* const changed_ = nullptr;
  // Neighbours in the list of all; also of guards that are const.
  mutable const ForkGuard* before_ = nullptr;
  mutable const ForkGuard* after_ = nullptr;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_FORK_GUARD_H_
