#include "store/remote_calls.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/worker.h"

namespace gkv {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

struct RemoteCalls::State {
  struct Breaker {
    bool open = false;
    bool trial = false;  // a probe, or a write that was let through, is running
    Clock::time_point retry_at;
    std::chrono::nanoseconds backoff;
  };

  const RemoteCallOptions options;
  const Work probe;
  Mutex mutex{AtFork::kWaits};
  Condition changed{mutex};
  Breaker read GUARDED_BY(mutex), write GUARDED_BY(mutex);
  // Abandoned calls that are in their step for less than the time-out.
  std::vector<std::shared_ptr<Call>> late GUARDED_BY(mutex);
  std::shared_ptr<Call> probing GUARDED_BY(mutex);
  RemoteCallStats stats GUARDED_BY(mutex);

  State(const RemoteCallOptions& o, Work p) : options(o), probe(std::move(p)) {
    read.backoff = write.backoff = options.first_backoff;
    late.reserve(options.max_calls);
  }

  void Trip(Breaker& breaker, Clock::time_point now) REQUIRES(mutex) {
    if (breaker.open && !breaker.trial) return;  // it failed already
    breaker.open = true;
    breaker.trial = false;
    breaker.retry_at = now + breaker.backoff;
    breaker.backoff = std::min(2 * breaker.backoff, options.longest_backoff);
    ++stats.opened;
  }

  void TripBoth(Clock::time_point now) REQUIRES(mutex) {
    Trip(read, now);
    Trip(write, now);
  }

  bool Overdue(const Call& call, Clock::time_point now) const {
    return now >= call.step_began_ + options.timeout;
  }

  // Opens breakers for abandoned calls and probes that are overdue by now.
  void Judge(Clock::time_point now) REQUIRES(mutex) {
    const auto overdue =
        std::partition(late.begin(), late.end(),
                       [&](const auto& call) { return !Overdue(*call, now); });
    if (overdue != late.end()) {
      late.erase(overdue, late.end());
      TripBoth(now);
    }
    if (probing && Overdue(*probing, now)) {
      probing.reset();  // its thread may go on, but no longer counts
      Trip(read, now);
    }
  }

  // Whether a call may begin; `probe_due` if the next thing is a probe.
  bool Admits(Side side, Clock::time_point now, bool& probe_due)
      REQUIRES(mutex) {
    Judge(now);
    if (!late.empty()) return false;
    if (read.open) {
      probe_due =
          !probing && now >= read.retry_at && stats.running < options.max_calls;
      return false;
    }
    if (side == Side::kRead || !write.open) return true;
    return !write.trial && now >= write.retry_at;
  }

  // Called at the end of the thread of `call`.
  void End(const std::shared_ptr<Call>& call,
           const std::optional<std::string>& error) {
    const MutexLock lock(mutex);
    const Clock::time_point now = Clock::now();
    --stats.running;
    call->failed_ = error.has_value();
    if (error) {
      ++stats.failures;
      stats.last_error = *error;
    }
    if (call->probe_) {
      if (probing == call) {
        probing.reset();
        if (call->failed_ || Overdue(*call, now)) {
          Trip(read, now);
        } else {
          // The back-off stays until a call succeeds.
          read.open = read.trial = false;
        }
      }
    } else if (const auto found = std::find(late.begin(), late.end(), call);
               found != late.end()) {
      late.erase(found);
      if (call->failed_) Trip(Of(call->side_), now);
    } else if (!call->abandoned_) {
      Breaker& breaker = Of(call->side_);
      if (call->failed_) {
        Trip(breaker, now);
      } else if (!breaker.open || breaker.trial) {
        breaker.open = breaker.trial = false;
        breaker.backoff = options.first_backoff;
      }
    }
    call->done_ = true;
    changed.NotifyAll();
  }

  Breaker& Of(Side side) REQUIRES(mutex) {
    return side == Side::kRead ? read : write;
  }
};

RemoteCalls::RemoteCalls(const RemoteCallOptions& options, Work probe)
    : state_(std::make_shared<State>(options, std::move(probe))) {}

// Requires: the state is locked.
void RemoteCalls::Launch(const std::shared_ptr<State>& state,
                         const std::shared_ptr<Call>& call, Work work) {
  state->mutex.AssertHeld();
  call->step_began_ = Clock::now();
  ++state->stats.running;
  try {
    RunElsewhere([state, call, work = std::move(work)]() mutable {
      std::optional<std::string> error;
      try {
        work(*call);
      } catch (const std::exception& e) {
        error = e.what();
      }
      work = nullptr;  // destroyed while the caller still waits
      state->End(call, error);
    });
  } catch (...) {
    --state->stats.running;
    throw;
  }
}

bool RemoteCalls::Run(Side side, Work work) {
  const Clock::time_point deadline = Clock::now() + state_->options.timeout;
  State& state = *state_;
  MutexLock lock(state.mutex);
  while (true) {
    bool probe_due = false;
    const bool admitted = state.Admits(side, Clock::now(), probe_due);
    if (admitted && state.stats.running < state.options.max_calls) break;
    if (probe_due) {
      const std::shared_ptr<Call> call(new Call(state_, side, true));
      try {
        Launch(state_, call, state.probe);
        state.probing = call;
        state.read.trial = true;
      } catch (const std::exception& error) {
        state.stats.last_error = error.what();
      }
    }
    if (!admitted ||
        !state.changed.WaitUntil(lock, deadline)) {
      ++state.stats.refused;
      return false;
    }
  }
  const std::shared_ptr<Call> call(new Call(state_, side, false));
  State::Breaker& breaker = state.Of(side);
  breaker.trial = breaker.open;
  ++state.stats.calls;
  try {
    Launch(state_, call, std::move(work));
  } catch (const std::exception& error) {
    ++state.stats.failures;
    state.stats.last_error = error.what();
    state.Trip(breaker, Clock::now());
    return false;
  }
  while (!call->done_) {
    const Clock::time_point end =
        side == Side::kRead ? deadline
                            : call->step_began_ + state.options.timeout;
    if (Clock::now() >= end) break;
    state.changed.WaitUntil(lock, end);
  }
  if (call->done_) return !call->failed_;
  call->abandoned_ = true;
  ++state.stats.timeouts;
  state.late.push_back(call);
  state.Judge(Clock::now());
  state.changed.NotifyAll();  // wakes callers that wait for a thread
  return false;
}

RemoteCallStats RemoteCalls::stats() const {
  const MutexLock lock(state_->mutex);
  state_->Judge(Clock::now());
  RemoteCallStats stats = state_->stats;
  stats.reads_open = state_->read.open;
  stats.writes_open = state_->write.open;
  return stats;
}

bool RemoteCalls::Call::Step() {
  const MutexLock lock(state_->mutex);
  if (abandoned_) return false;
  step_began_ = Clock::now();
  return true;
}

}  // namespace gkv
