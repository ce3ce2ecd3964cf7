#include "base/fork_guard.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

namespace gkv {

struct GuardedMutexes {
  std::mutex mutex;  // guards the list
  const ForkGuard* first = nullptr;
  std::atomic<size_t> waits = 0;

  static GuardedMutexes& Get() {
    // Never destroyed: guards may outlive static destruction.
    static auto* const all = new GuardedMutexes;
    return *all;
  }

  bool TryLockAll() {
    mutex.lock();
    for (const ForkGuard* at = first; at != nullptr; at = at->after_) {
      if (at->TryLock()) continue;
      while ((at = at->before_) != nullptr) at->Unlock();
      mutex.unlock();
      return false;
    }
    return true;
  }

  // All at once or none: so the order in which others lock them does not
  // matter.
  static void LockAll() {
    GuardedMutexes& all = Get();
    while (!all.TryLockAll()) {
      ++all.waits;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  static void UnlockAll() {
    GuardedMutexes& all = Get();
    for (const ForkGuard* at = all.first; at != nullptr; at = at->after_) {
      at->Unlock();
    }
    all.mutex.unlock();
  }

  static void UnlockInChild() {
    GuardedMutexes& all = Get();
    for (const ForkGuard* at = all.first; at != nullptr; at = at->after_) {
      at->RenewInChild();
    }
    all.mutex.unlock();
  }
};

ForkGuard::ForkGuard(const Mutexes& mutexes, std::condition_variable* changed)
    : mutexes_(mutexes), changed_(changed) {
  Enter();
}

ForkGuard::ForkGuard(std::shared_mutex& mutex) : shared_mutex_(&mutex) {
  Enter();
}

void ForkGuard::Enter() {
  [[maybe_unused]] static const int once =
      pthread_atfork(&GuardedMutexes::LockAll, &GuardedMutexes::UnlockAll,
                     &GuardedMutexes::UnlockInChild);
  GuardedMutexes& all = GuardedMutexes::Get();
  const std::lock_guard lock(all.mutex);
  after_ = all.first;
  if (after_ != nullptr) after_->before_ = this;
  all.first = this;
}

ForkGuard::~ForkGuard() {
  GuardedMutexes& all = GuardedMutexes::Get();
  const std::lock_guard lock(all.mutex);
  (before_ != nullptr ? before_->after_ : all.first) = after_;
  if (after_ != nullptr) after_->before_ = before_;
}

size_t ForkGuard::waits() noexcept { return GuardedMutexes::Get().waits; }

bool ForkGuard::TryLock() const {
  if (shared_mutex_ != nullptr) return shared_mutex_->try_lock();
  for (size_t i = 0; i < mutexes_.size(); ++i) {
    if (mutexes_[i] == nullptr || mutexes_[i]->try_lock()) continue;
    while (i-- > 0) {
      if (mutexes_[i] != nullptr) mutexes_[i]->unlock();
    }
    return false;
  }
  return true;
}

void ForkGuard::Unlock() const {
  if (shared_mutex_ != nullptr) return shared_mutex_->unlock();
  for (std::mutex* const mutex : mutexes_) {
    if (mutex != nullptr) mutex->unlock();
  }
}

// A lock for reading and writing knows its writer by a number that the child's
// thread does not have; a variable waits at its end for those that wait on it.
void ForkGuard::RenewInChild() const {
  if (shared_mutex_ != nullptr) {
    new (shared_mutex_) std::shared_mutex;
  } else {
    Unlock();
  }
  if (changed_ != nullptr) new (changed_) std::condition_variable;
}

}  // namespace gkv
