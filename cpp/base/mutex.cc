#include "base/mutex.h"

#include <pthread.h>

#include <new>
#include <thread>
#include <utility>

namespace gkv {

struct ForkScopes {
  std::mutex mutex;  // guards the list
  ForkScope* first = nullptr;
  std::atomic<size_t> waits = 0;

  static ForkScopes& Get() {
    // Never destroyed: scopes may outlive static destruction.
    static auto* const all = new ForkScopes;
    return *all;
  }

  template <typename Fn>
  static void ForHeld(const ForkScope& scope, const Fn& fn) {
    for (ForkMember* at = scope.held_; at != nullptr; at = at->next_) fn(*at);
  }

  static bool TryLock(ForkScope& scope) {
    // A member that joins from now on is known only to the thread that makes
    // it.
    scope.held_ = scope.newest_.load(std::memory_order_acquire);
    for (ForkMember* at = scope.held_; at != nullptr; at = at->next_) {
      if (at->TryLockForFork()) continue;
      for (ForkMember* held = scope.held_; held != at; held = held->next_) {
        held->UnlockAfterFork();
      }
      return false;
    }
    return true;
  }

  static void Unlock(const ForkScope& scope) {
    ForHeld(scope, [](ForkMember& member) { member.UnlockAfterFork(); });
  }

  bool TryLockAll() {
    mutex.lock();
    for (ForkScope* at = first; at != nullptr; at = at->after_) {
      if (TryLock(*at)) continue;
      while ((at = at->before_) != nullptr) Unlock(*at);
      mutex.unlock();
      return false;
    }
    return true;
  }

  // Locks all of them or none, so the order in which other threads lock them
  // does not matter.
  static void LockAll() {
    ForkScopes& all = Get();
    while (!all.TryLockAll()) {
      ++all.waits;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  static void UnlockAll() {
    ForkScopes& all = Get();
    for (ForkScope* at = all.first; at != nullptr; at = at->after_) Unlock(*at);
    all.mutex.unlock();
  }

  static void UnlockInChild() {
    ForkScopes& all = Get();
    for (ForkScope* at = all.first; at != nullptr; at = at->after_) {
      ForHeld(*at, [](ForkMember& member) { member.RenewInChild(); });
    }
    all.mutex.unlock();
  }
};

ForkScope::ForkScope() {
  [[maybe_unused]] static const int once =
      pthread_atfork(&ForkScopes::LockAll, &ForkScopes::UnlockAll,
                     &ForkScopes::UnlockInChild);
  ForkScopes& all = ForkScopes::Get();
  const std::lock_guard lock(all.mutex);
  after_ = all.first;
  if (after_ != nullptr) after_->before_ = this;
  all.first = this;
}

void ForkScope::Leave() noexcept {
  if (!std::exchange(listed_, false)) return;
  ForkScopes& all = ForkScopes::Get();
  const std::lock_guard lock(all.mutex);
  (before_ != nullptr ? before_->after_ : all.first) = after_;
  if (after_ != nullptr) after_->before_ = before_;
}

size_t ForkScope::waits() noexcept { return ForkScopes::Get().waits; }

void ForkMember::JoinScope() noexcept {
  if (scope_ == nullptr) return;
  next_ = scope_->newest_.load(std::memory_order_relaxed);
  scope_->newest_.store(this, std::memory_order_release);
}

ForkMember::ForkMember(AtFork at_fork)
    : own_(at_fork == AtFork::kWaits ? std::make_unique<ForkScope>() : nullptr),
      scope_(own_.get()) {}

// The old variable is not destroyed: its destructor would wait for the threads
// that wait on it.
void Condition::RenewInChild() { new (&changed_) std::condition_variable; }

// A std::shared_mutex knows its writer by a number that the child's thread does
// not have, so the child cannot unlock it.
void SharedMutex::RenewInChild() { new (&mutex_) std::shared_mutex; }

}  // namespace gkv
