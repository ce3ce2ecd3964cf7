#include "store/remote_calls.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
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
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  Breaker read, write;
  // Abandoned, and not yet longer in their step than the time-out.
  std::vector<std::shared_ptr<Call>> late;
  std::shared_ptr<Call> probing;
  RemoteCallStats stats;
  const ForkGuard guard{mutex, &changed};

  State(const RemoteCallOptions& o, Work p) : options(o), probe(std::move(p)) {
    read.backoff = write.backoff = options.first_backoff;
    late.reserve(options.max_calls);
  }

  void Trip(Breaker& breaker, Clock::time_point now) {
    if (breaker.open && !breaker.trial) return;  // it failed already
    breaker.open = true;
    breaker.trial = false;
    breaker.retry_at = now + breaker.backoff;
    breaker.backoff = std::min(2 * breaker.backoff, options.longest_backoff);
    ++stats.opened;
  }

  void TripBoth(Clock::time_point now) {
    Trip(read, now);
    Trip(write, now);
  }

  bool Overdue(const Call& call, Clock::time_point now) const {
    return now >= call.step_began_ + options.timeout;
  }

  // What abandoned calls and probes turned out to be meanwhile.
  void Judge(Clock::time_point now) {
    const auto overdue =
        std::partition(late.begin(), late.end(),
                       [&](const auto& call) { return !Overdue(*call, now); });
    if (overdue != late.end()) {
      late.erase(overdue, late.end());
      TripBoth(now);
    }
    if (probing && Overdue(*probing, now)) {
      probing.reset();  // its thread may go on, and says nothing any more
      Trip(read, now);
    }
  }

  // Whether a call may begin; `probe_due` if the next thing is a probe.
  bool Admits(Side side, Clock::time_point now, bool& probe_due) {
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

  // The thread of `call` is at its end.
  void End(const std::shared_ptr<Call>& call,
           const std::optional<std::string>& error) {
    const std::lock_guard lock(mutex);
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
    changed.notify_all();
  }

  Breaker& Of(Side side) { return side == Side::kRead ? read : write; }
};

RemoteCalls::RemoteCalls(const RemoteCallOptions& options, Work probe)
    : state_(std::make_shared<State>(options, std::move(probe))) {}

// Requires: the state is locked.
void RemoteCalls::Launch(const std::shared_ptr<State>& state,
                         const std::shared_ptr<Call>& call, Work work) {
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
      work = nullptr;  // while whoever waits still does
      state->End(call, error);
    });
  } catch (...) {
    --state->stats.running;
    throw;
  }
}

bool RemoteCalls::Run(Side side, Work work) {
  const Clock::time_point deadline = Clock::now() + state_->options.timeout;
  std::unique_lock lock(state_->mutex);
  State& state = *state_;
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
        state.changed.wait_until(lock, deadline) == std::cv_status::timeout) {
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
    state.changed.wait_until(lock, end);
  }
  if (call->done_) return !call->failed_;
  call->abandoned_ = true;
  ++state.stats.timeouts;
  state.late.push_back(call);
  state.Judge(Clock::now());
  state.changed.notify_all();  // who waits for a thread need not any more
  return false;
}

RemoteCallStats RemoteCalls::stats() const {
  const std::lock_guard lock(state_->mutex);
  state_->Judge(Clock::now());
  RemoteCallStats stats = state_->stats;
  stats.reads_open = state_->read.open;
  stats.writes_open = state_->write.open;
  return stats;
}

bool RemoteCalls::Call::Step() {
  const std::lock_guard lock(state_->mutex);
  if (abandoned_) return false;
  step_began_ = Clock::now();
  return true;
}

}  // namespace gkv
