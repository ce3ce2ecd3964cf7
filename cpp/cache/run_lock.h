#ifndef GEMMAKV_CACHE_RUN_LOCK_H_
#define GEMMAKV_CACHE_RUN_LOCK_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/own_process.h"

namespace gkv {

class RunGate;

// Proof that its holder alone runs steps on, or changes, one KVCache: from
// KVCache::Lock() or TryLock(). May be moved to, and released on, any thread.
// The cache must outlive it.
class RunLock {
 public:
  RunLock() = default;
  RunLock(RunLock&& other) noexcept
      : gate_(std::exchange(other.gate_, nullptr)), serial_(other.serial_) {}
  RunLock& operator=(RunLock&& other) noexcept {
    std::swap(gate_, other.gate_);
    std::swap(serial_, other.serial_);
    other.Release();
    return *this;
  }
  ~RunLock() { Release(); }

  explicit operator bool() const { return gate_ != nullptr; }
  // The locks of a cache are numbered: of two with consecutive numbers, nobody
  // held one in between. Stays when the lock is released.
  uint64_t serial() const { return serial_; }
  void Release() noexcept;
  // Says whether the holder can go on only when somebody reads what it made. If
  // so, its wait for the reader begins now, also where it waited before.
  void set_waits_for_reader(bool waits) const noexcept;

 private:
  friend class RunGate;
  RunLock(RunGate* gate, uint64_t serial) : gate_(gate), serial_(serial) {}

  RunGate* gate_ = nullptr;
  uint64_t serial_ = 0;
};

// One call that waits for a lock, and what it has seen of the gate. Not
// thread-safe.
class LockWait {
 public:
  LockWait() = default;

 private:
  friend class RunGate;
  const std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
  // Since when the holder waited for its reader at the last look, and how many
  // looks in a row after the first one saw the same.
  std::chrono::steady_clock::time_point reader_since_;
  int looks_ = 0;
};

// Hands out one RunLock at a time. Thread-safe. A thread that works for a step
// (InsideStep) waits for no lock, since others wait for it: where it would have
// to, Lock() and TryLock(wait) throw Busy.
class RunGate {
 public:
  explicit RunGate(ForkScope& scope) : mutex_(scope) {}
  RunGate(const RunGate&) = delete;

  // Waits while another lock is held, calling `poll` now and then, which may
  // throw to give up. Throws Busy if the holder waits for a reader that has
  // taken nothing for 100 ms of the call and at three looks in a row: after a
  // pause without a processor, readers get their turn between the looks. Throws
  // Error if the holder stayed in the parent when the process was forked.
  RunLock Lock(const std::function<void()>& poll = {});
  // A lock that holds nothing if another one is held.
  RunLock TryLock() noexcept;
  // The same; `on_free`, if not null, is then called once, on any thread, when
  // that one is let go of. Throws as Lock() does; `wait` is the caller's, the
  // same at each of its attempts, between which readers get their turn.
  using Callback = std::shared_ptr<const std::function<void()>>;
  RunLock TryLock(LockWait& wait, const Callback& on_free);
  // The same if somebody held one since the lock numbered `serial`.
  RunLock TryLockAfter(uint64_t serial) noexcept;
  // Whether a lock is held at this moment.
  bool held() const noexcept {
    const MutexLock lock(mutex_);
    return held_;
  }
  // Whether `lock` is this gate's.
  bool Owns(const RunLock& lock) const { return lock.gate_ == this; }

 private:
  friend class RunLock;
  RunLock Take() noexcept REQUIRES(mutex_);
  void CheckHolder(LockWait& wait) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  Condition changed_{mutex_};
  bool held_ GUARDED_BY(mutex_) = false;
  OwnProcess holder_process_ GUARDED_BY(mutex_);
  uint64_t serial_ GUARDED_BY(mutex_) = 0;
  std::vector<Callback> waiting_ GUARDED_BY(mutex_);
  bool waits_for_reader_ GUARDED_BY(mutex_) = false;
  // If it does.
  std::chrono::steady_clock::time_point waits_since_ GUARDED_BY(mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_RUN_LOCK_H_
