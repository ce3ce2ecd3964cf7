#include "cache/run_lock.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace gkv {
namespace {

// A reader that is at it may take what it waits for in this time.
constexpr std::chrono::milliseconds kGrace{100};
constexpr std::chrono::milliseconds kPollInterval{50};

}  // namespace

// Under the mutex to the end: whoever gets the lock next may destroy the gate.
void RunLock::Release() noexcept {
  if (gate_ == nullptr) return;
  RunGate* const gate = std::exchange(gate_, nullptr);
  const std::lock_guard lock(gate->mutex_);
  gate->held_ = gate->waits_for_reader_ = false;
  gate->changed_.notify_one();
}

void RunLock::set_waits_for_reader(bool waits) const noexcept {
  if (gate_ == nullptr) return;
  const std::lock_guard lock(gate_->mutex_);
  if (waits && !gate_->waits_for_reader_) {
    gate_->waits_since_ = std::chrono::steady_clock::now();
  }
  gate_->waits_for_reader_ = waits;
}

RunLock RunGate::Lock(const std::function<void()>& poll) {
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPollInterval, [&] { return !held_; })) {
    if (waits_for_reader_ &&
        std::chrono::steady_clock::now() - std::max(begin, waits_since_) >=
            kGrace) {
      throw Busy(
          "the cache: a stream on it waits for its reader; read the stream to "
          "its end, or cancel() it first");
    }
    if (!poll) continue;
    lock.unlock();
    poll();
    lock.lock();
  }
  held_ = true;
  return RunLock(this, ++serial_);
}

RunLock RunGate::TryLock() noexcept {
  const std::lock_guard lock(mutex_);
  if (held_) return RunLock();
  held_ = true;
  return RunLock(this, ++serial_);
}

RunLock RunGate::TryLockAfter(uint64_t serial) noexcept {
  const std::lock_guard lock(mutex_);
  if (held_ || serial_ != serial) return RunLock();
  held_ = true;
  return RunLock(this, ++serial_);
}

}  // namespace gkv
