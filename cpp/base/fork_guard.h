#ifndef GEMMAKV_BASE_FORK_GUARD_H_
#define GEMMAKV_BASE_FORK_GUARD_H_

#include <condition_variable>
#include <mutex>
#include <new>

#include "base/mutex.h"

namespace gkv {

// Makes fork() wait for a mutex of the standard library, as AtFork::kWaits does
// for one of ours.
class ForkGuard final : private ForkMember {
 public:
  // The mutex outlives it, and so does what threads wait on with the mutex, if
  // there is such a thing.
  explicit ForkGuard(std::mutex& mutex,
                     std::condition_variable* changed = nullptr)
      : ForkMember(AtFork::kWaits), mutex_(mutex), changed_(changed) {
    JoinScope();
  }
  ~ForkGuard() { LeaveScope(); }

 private:
  bool TryLockForFork() override { return mutex_.try_lock(); }
  void UnlockAfterFork() override { mutex_.unlock(); }
  void RenewInChild() override {
    mutex_.unlock();
    if (changed_ != nullptr) new (changed_) std::condition_variable;
  }

  std::mutex& mutex_;
  std::condition_variable* const changed_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_FORK_GUARD_H_
