#ifndef GEMMAKV_BASE_MUTEX_H_
#define GEMMAKV_BASE_MUTEX_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>

// Attributes for Clang's thread-safety analysis, which reports a lock that is
// forgotten. Other compilers see nothing.
#if defined(__clang__)
#define GKV_ANALYSIS(...) __attribute__((__VA_ARGS__))
#else
#define GKV_ANALYSIS(...)
#endif
// Says that only a thread that holds the mutex touches a member.
#define GUARDED_BY(mutex) GKV_ANALYSIS(guarded_by(mutex))
// Says that the callers of a function hold the mutex.
#define REQUIRES(...) GKV_ANALYSIS(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) \
  GKV_ANALYSIS(requires_shared_capability(__VA_ARGS__))
// Says that the callers of a function do not hold the mutex.
#define EXCLUDES(...) GKV_ANALYSIS(locks_excluded(__VA_ARGS__))
// Turns the analysis off for a function that it cannot follow.
#define NOT_ANALYZED GKV_ANALYSIS(no_thread_safety_analysis)

namespace gkv {

// Mutexes, and what fork() does with them.
//
// fork() copies one thread of a process. A mutex that another thread held stays
// held for ever in the child, and what it guards may be half changed. So each
// mutex says when it is made what becomes of it:
//  - AtFork::kWaits: fork() waits until nobody holds the mutex, and holds it
//    while the process is copied. A child finds what it guards whole, and may
//    lock it. This is for mutexes that are held for moments, never by a thread
//    that forks or that waits for one that forks.
//  - AtFork::kLeaves: a child may find the mutex held, and never locks it.
//  - A ForkScope: as kWaits, for all mutexes and conditions of one object at
//    once. An object that is made as often as a conversation has one; kWaits
//    makes a scope for the mutex alone.
//
// All scopes are in one list, which has a mutex of its own (ForkScopes in
// mutex.cc); to enter and leave it takes 50 ns. Each scope has a list of its
// members, which only grows. fork() holds the list of scopes and all mutexes of
// all of them. Where one is held by a thread, fork() releases the others,
// sleeps for a moment and tries again, so the order in which threads lock them
// does not matter. After the copy the parent releases all of them. The child
// releases the mutexes and makes the conditions and the shared mutexes anew.
enum class AtFork { kWaits, kLeaves };

class ForkMember;

// The mutexes and conditions of one object, which live no longer than the
// scope. The first of them that is destroyed takes the scope out of the list of
// all scopes, since then the object is being destroyed.
class ForkScope {
 public:
  ForkScope();
  ~ForkScope() { Leave(); }
  ForkScope(const ForkScope&) = delete;
  ForkScope& operator=(const ForkScope&) = delete;

  // Returns how often a fork() has found a mutex held and has waited. For
  // tests.
  static size_t waits() noexcept;

 private:
  friend class ForkMember;
  friend struct ForkScopes;
  void Leave() noexcept;

  std::atomic<ForkMember*> newest_ = nullptr;  // begins the list of members
  ForkMember* held_ = nullptr;  // the newest one that fork() holds
  bool listed_ = true;
  ForkScope* before_ = nullptr;  // neighbours in the list of all
  ForkScope* after_ = nullptr;
};

// A mutex or a condition: a member of a scope, or of none. A derived class
// joins the scope at the end of its constructor and leaves it at the beginning
// of its destructor.
class ForkMember {
 public:
  ForkMember(const ForkMember&) = delete;
  ForkMember& operator=(const ForkMember&) = delete;

 protected:
  explicit ForkMember(ForkScope* scope) : scope_(scope) {}
  explicit ForkMember(AtFork at_fork);
  ~ForkMember() = default;
  void JoinScope() noexcept;
  void LeaveScope() noexcept {
    if (scope_ != nullptr) scope_->Leave();
  }
  ForkScope* scope() const { return scope_; }

 private:
  friend struct ForkScopes;
  virtual bool TryLockForFork() { return true; }
  virtual void UnlockAfterFork() {}
  virtual void RenewInChild() = 0;

  const std::unique_ptr<ForkScope> own_;
  ForkScope* const scope_;
  ForkMember* next_ = nullptr;  // the one that joined the scope before it
};

class GKV_ANALYSIS(capability("mutex")) Mutex final : public ForkMember {
 public:
  explicit Mutex(AtFork at_fork) : ForkMember(at_fork) { JoinScope(); }
  explicit Mutex(ForkScope& scope) : ForkMember(&scope) { JoinScope(); }
  ~Mutex() { LeaveScope(); }

  void Lock() GKV_ANALYSIS(acquire_capability()) { mutex_.lock(); }
  bool TryLock() GKV_ANALYSIS(try_acquire_capability(true)) {
    return mutex_.try_lock();
  }
  void Unlock() GKV_ANALYSIS(release_capability()) { mutex_.unlock(); }
  // For a function that cannot name the mutex which its caller holds.
  void AssertHeld() const GKV_ANALYSIS(assert_capability(this)) {}

 private:
  friend class Condition;
  friend class MutexLock;
  bool TryLockForFork() override { return mutex_.try_lock(); }
  void UnlockAfterFork() override { mutex_.unlock(); }
  void RenewInChild() override { mutex_.unlock(); }

  std::mutex mutex_;
};

// Holds a mutex until the end of its scope, or until Unlock().
class GKV_ANALYSIS(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) GKV_ANALYSIS(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  // Takes over a mutex that the thread has locked already.
  MutexLock(Mutex& mutex, std::adopt_lock_t)
      GKV_ANALYSIS(requires_capability(mutex))
      : lock_(mutex.mutex_, std::adopt_lock) {}
  ~MutexLock() GKV_ANALYSIS(release_capability()) {}
  MutexLock(const MutexLock&) = delete;

  void Lock() GKV_ANALYSIS(acquire_capability()) { lock_.lock(); }
  void Unlock() GKV_ANALYSIS(release_capability()) { lock_.unlock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// The condition variable of a Mutex. The threads that wait on it do not exist
// in a child of fork(), which therefore begins with a new one.
class Condition final : public ForkMember {
 public:
  explicit Condition(Mutex& mutex) : ForkMember(mutex.scope()) {
    JoinScope();
  }
  ~Condition() { LeaveScope(); }

  void NotifyOne() noexcept { changed_.notify_one(); }
  void NotifyAll() noexcept { changed_.notify_all(); }

  // `lock` holds the condition's mutex. `done` is called under it, and is
  // written `[&]() REQUIRES(mutex_) { ... }`. With a time and a `done`, the
  // result is what `done` said last.
  void Wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  template <typename Done>
  void Wait(MutexLock& lock, const Done& done) NOT_ANALYZED {
    while (!done()) Wait(lock);
  }
  // Returns false if the time is over.
  template <typename Clock, typename Duration>
  bool WaitUntil(MutexLock& lock,
                 const std::chrono::time_point<Clock, Duration>& until) {
    return changed_.wait_until(lock.lock_, until) == std::cv_status::no_timeout;
  }
  template <typename Clock, typename Duration, typename Done>
  bool WaitUntil(MutexLock& lock,
                 const std::chrono::time_point<Clock, Duration>& until,
                 const Done& done) NOT_ANALYZED {
    return changed_.wait_until(lock.lock_, until, done);
  }
  template <typename Rep, typename Period, typename Done>
  bool WaitFor(MutexLock& lock, const std::chrono::duration<Rep, Period>& time,
               const Done& done) NOT_ANALYZED {
    return changed_.wait_for(lock.lock_, time, done);
  }
  template <typename Rep, typename Period>
  bool WaitFor(MutexLock& lock,
               const std::chrono::duration<Rep, Period>& time) {
    return changed_.wait_for(lock.lock_, time) == std::cv_status::no_timeout;
  }

 private:
  void RenewInChild() override;

  std::condition_variable changed_;
};

// One writer, or any number of readers.
class GKV_ANALYSIS(capability("mutex")) SharedMutex final : public ForkMember {
 public:
  explicit SharedMutex(AtFork at_fork) : ForkMember(at_fork) { JoinScope(); }
  ~SharedMutex() { LeaveScope(); }

 private:
  friend class ReadLock;
  friend class WriteLock;
  bool TryLockForFork() override { return mutex_.try_lock(); }
  void UnlockAfterFork() override { mutex_.unlock(); }
  void RenewInChild() override;

  std::shared_mutex mutex_;
};

class GKV_ANALYSIS(scoped_lockable) ReadLock {
 public:
  explicit ReadLock(SharedMutex& mutex)
      GKV_ANALYSIS(acquire_shared_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~ReadLock() GKV_ANALYSIS(release_capability()) {}

 private:
  const std::shared_lock<std::shared_mutex> lock_;
};

class GKV_ANALYSIS(scoped_lockable) WriteLock {
 public:
  explicit WriteLock(SharedMutex& mutex)
      GKV_ANALYSIS(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~WriteLock() GKV_ANALYSIS(release_capability()) {}

 private:
  const std::unique_lock<std::shared_mutex> lock_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_MUTEX_H_
