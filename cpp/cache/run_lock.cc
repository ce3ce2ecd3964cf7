#include "cache/run_lock.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/inside_step.h"
#include "base/process.h"

namespace gkv {
namespace {

// A reader that is at it may take what it waits for in this time.
constexpr std::chrono::milliseconds kGrace{100};
constexpr std::chrono::milliseconds kPollInterval{50};
// The number of looks in a row, after the first, that must see a reader that
// has taken nothing: if the process was frozen between two looks, so was the
// reader.
constexpr int kLooks = 2;

}  // namespace

// Whoever gets the lock next may destroy the gate: it is not touched behind the
// mutex.
void RunLock::Release() noexcept {
  if (gate_ == nullptr) return;
  RunGate* const gate = std::exchange(gate_, nullptr);
  std::vector<RunGate::Callback> waiting;
  {
    const MutexLock lock(gate->mutex_);
    gate->held_ = gate->waits_for_reader_ = false;
    waiting.swap(gate->waiting_);
    gate->changed_.NotifyOne();
  }
  for (const auto& on_free : waiting) (*on_free)();
}

void RunLock::set_waits_for_reader(bool waits) const noexcept {
  if (gate_ == nullptr) return;
  const MutexLock lock(gate_->mutex_);
  if (waits) gate_->waits_since_ = std::chrono::steady_clock::now();
  gate_->waits_for_reader_ = waits;
}

RunLock RunGate::Lock(const std::function<void()>& poll) {
  LockWait wait;
  MutexLock lock(mutex_);
  if (held_) CheckHolder(wait);
  const auto free = [&]() REQUIRES(mutex_) { return !held_; };
  while (!changed_.WaitFor(lock, kPollInterval, free)) {
    CheckHolder(wait);
    if (!poll) continue;
    lock.Unlock();
    poll();
    lock.Lock();
  }
  return Take();
}

RunLock RunGate::TryLock() noexcept {
  const MutexLock lock(mutex_);
  return held_ ? RunLock() : Take();
}

RunLock RunGate::TryLock(LockWait& wait, const Callback& on_free) {
  const MutexLock lock(mutex_);
  if (!held_) return Take();
  CheckHolder(wait);
  if (on_free != nullptr && std::find(waiting_.begin(), waiting_.end(),
                                      on_free) == waiting_.end()) {
    waiting_.push_back(on_free);
  }
  return RunLock();
}

RunLock RunGate::TryLockAfter(uint64_t serial) noexcept {
  const MutexLock lock(mutex_);
  return held_ || serial_ != serial ? RunLock() : Take();
}

RunLock RunGate::Take() noexcept {
  held_ = true;
  holder_process_ = OwnProcess();
  return RunLock(this, ++serial_);
}

// Throws if there is nothing to wait for.
void RunGate::CheckHolder(LockWait& wait) const {
  if (holder_process_.InChild()) {
    throw Error(
        "the cache: a call was running on it when this process was forked, and "
        "runs in the parent only; expected caches in the child that no call "
        "used then, such as forks");
  }
  if (InsideStep::Runner() != nullptr) {
    throw Busy(
        "the cache: in use, and what runs inside a step, as a "
        "logits_processor, waits for nothing; expected a cache that no other "
        "call uses, as a fork");
  }
  const bool same = waits_for_reader_ && waits_since_ == wait.reader_since_;
  wait.looks_ = same ? wait.looks_ + 1 : 0;
  wait.reader_since_ = waits_since_;
  if (wait.looks_ >= kLooks &&
      std::chrono::steady_clock::now() - std::max(wait.begin_, waits_since_) >=
          kGrace) {
    throw Busy(
        "the cache: a stream on it waits for its reader; read the stream to "
        "its end, or cancel() it first");
  }
}

}  // namespace gkv
