#include "engine/run_queue.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "engine/step_wait.h"

namespace gkv {
namespace {


// Whether the request competes for steps and for blocks of its pool, now or
// when it restarts.
bool Active(const Request& request) {
  return request.runnable() || (request.is<Request::Preempted>() &&
                                !request.stream().waits_for_reader());
}

bool SamePool(const Request& a, const Request& b) {
  return &a.cache().pool() == &b.cache().pool();
}

bool Undecided(const Request& request) {
  return !request.is<Request::Settled>() && !request.is<Request::Ended>();
}

bool Older(const Request& a, const Request& b) {
  return a.number() < b.number();
}

}  // namespace

void RunQueue::Submit(std::list<Request>&& requests) {
  StepWait::CheckNotInside(wake_up_.get());
  for (const Request& request : requests) {
    TokenStream& stream = request.stream();
    stream.set_wake_up(wake_up_);
    // The caller waits for the end of a request that is not streamed.
    if (!stream.streamed()) stream.PrepareToWait();
  }
  {
    const MutexLock lock(wake_up_->mutex);
    const size_t limit =
        options_.max_running +
        std::min(options_.max_queued,
                 std::numeric_limits<size_t>::max() - options_.max_running);
    if (unfinished_ + requests.size() > limit) {
      throw QueueFull(StrCat("the model: ", unfinished_, " requests run or ",
                             "wait and ", requests.size(),
                             " more are asked for, expected at most ", limit,
                             " in total; try again later"));
    }
    unfinished_ += requests.size();
    incoming_.splice(incoming_.end(), requests);
  }
  wake_up_->changed.NotifyAll();
}

void RunQueue::Stop() {
  {
    const MutexLock lock(wake_up_->mutex);
    stopping_ = true;
  }
  wake_up_->changed.NotifyAll();
}

bool RunQueue::WaitForWork() {
  Requests arrivals;
  bool stopping;
  {
    MutexLock lock(wake_up_->mutex);
    if (!HasWork()) {
      const auto ready = [&]() REQUIRES(wake_up_->mutex) { return HasWork(); };
      // When the loop is to go on though nobody wakes it.
      std::optional<Clock::time_point> until = next_deadline_;
      if (next_fetch_) {
        until = std::min(until.value_or(*next_fetch_), *next_fetch_);
      }
      if (until) {
        wake_up_->changed.WaitUntil(lock, *until, ready);
      } else {
        wake_up_->changed.Wait(lock, ready);
      }
    }
    arrivals.splice(arrivals.end(), incoming_);
    interrupted_ |= std::exchange(wake_up_->interrupted, false);
    stopping = stopping_;
  }
  TakeOver(arrivals);
  if (!stopping) return true;
  bool any = false;
  for (const auto* requests : {&waiting_, &delayed_, &running_, &settled_}) {
    for (const Request& request : *requests) {
      request.stream().Stop(TokenStream::Interrupt::kCancel);
      any = true;
    }
  }
  interrupted_ = true;
  return any;
}

// Whether there is something to do. If one request competes, one can compute:
// the oldest preempted request of a pool restarts if no older one of the pool
// competes. If none competes, there are places for waiting requests.
bool RunQueue::HasWork() const {
  if (stopping_ || !incoming_.empty() || wake_up_->interrupted ||
      wake_up_->prefix_changed || !waiting_.empty()) {
    return true;
  }
  return std::any_of(running_.begin(), running_.end(),
                     [&](const Request& request) {
                       Look(1);
                       return Active(request) || request.may_end();
                     });
}

void RunQueue::TakeOver(Requests& arrivals) {
  for (Request& request : arrivals) {
    request.set_number(++arrivals_);
    if (const auto& deadline = request.deadline()) {
      next_deadline_ = std::min(next_deadline_.value_or(*deadline), *deadline);
    }
    // The stream may have been stopped before it knew whom to wake.
    if (request.stream().interrupt() != TokenStream::Interrupt::kNone) {
      interrupted_ = true;
    }
  }
  waiting_.splice(waiting_.end(), arrivals);
}

void RunQueue::Interrupt() {
  const bool over = next_deadline_ && Clock::now() >= *next_deadline_;
  if (!std::exchange(interrupted_, false) && !over) return;
  next_deadline_.reset();
  ended_anywhere_ = true;
  for (auto* requests : {&waiting_, &delayed_, &running_, &settled_}) {
    InterruptAll(*requests);
  }
}

void RunQueue::InterruptAll(Requests& requests) {
  const Clock::time_point now = Clock::now();
  Look(requests.size());
  for (Request& request : requests) {
    const TokenStream::Interrupt how = request.stream().interrupt();
    const auto& deadline = request.deadline();
    if (how == TokenStream::Interrupt::kAbort) {
      request.Fail(nullptr);
    } else if (how == TokenStream::Interrupt::kCancel) {
      request.Settle(FinishReason::kCancelled);
    } else if (deadline && now >= *deadline) {
      request.EndAtDeadline();
    } else if (deadline && (Undecided(request) || !request.batch())) {
      next_deadline_ = std::min(next_deadline_.value_or(*deadline), *deadline);
    }
  }
}

bool RunQueue::Retire() {
  bool decided = std::exchange(ended_anywhere_, false);
  // Whether waiting requests may end, too.
  bool waiting_end = decided;
  Look(running_.size());
  for (auto at = running_.begin(); at != running_.end();) {
    const auto request = at++;
    request->EndSettled();
    if (request->is<Request::Settled>() && request->batch()) {
      Move(running_, request, settled_);
    } else if (request->is<Request::Ended>()) {
      if (const Batch* const batch = request->batch()) {
        decided = decided || batch->decided();
        waiting_end = waiting_end || (batch->failed && batch->unstarted > 0);
      }
      ended_.splice(ended_.end(), running_, request);
    }
  }
  if (waiting_end) {
    EndDecided(waiting_);
    EndDecided(delayed_);
  }
  if (decided) EndDecided(settled_);
  if (ended_.empty()) return false;
  const size_t ended = ended_.size();
  ended_.clear();
  ended_since_preempting_ = true;
  const MutexLock lock(wake_up_->mutex);
  unfinished_ -= ended;
  return true;
}

// Ends requests whose batch is decided.
void RunQueue::EndDecided(Requests& requests) {
  Look(requests.size());
  for (auto at = requests.begin(); at != requests.end();) {
    const auto request = at++;
    request->EndSettled();
    if (request->is<Request::Ended>()) {
      ended_.splice(ended_.end(), requests, request);
    } else if (request->is<Request::Settled>() && &requests != &settled_) {
      Move(requests, request, request->batch() ? settled_ : running_);
    }
  }
}

// Moves a request to its place by age.
void RunQueue::Move(Requests& from, Requests::iterator what, Requests& to) {
  auto before = to.end();
  while (before != to.begin() && Older(*what, *std::prev(before))) --before;
  to.splice(before, from, what);
}

void RunQueue::Admit() {
  ReleaseDelayed();
  size_t active = 0;
  bool gave_way = false, catching_up = false;
  for (const Request& request : running_) {
    if (!Active(request)) continue;
    ++active;
    gave_way = gave_way || request.is<Request::Preempted>();
    catching_up = catching_up || request.catching_up();
  }
  Look(running_.size());
  // The pools and the leaders of the requests before `at`.
  pools_.clear();
  leaders_.clear();
  auto waiting = waiting_.begin();
  for (auto at = running_.begin();;) {
    const bool any_waits =
        waiting != waiting_.end() && active < options_.max_running;
    if (!any_waits && (at == running_.end() || !gave_way)) break;
    Look(1);
    if (any_waits &&
        (at == running_.end() || waiting->number() < at->number())) {
      const auto next = waiting++;
      if (TryDelay(*next)) {
        delayed_.splice(delayed_.end(), waiting_, next);
        continue;
      }
      // It is served after those that run. A preempted request keeps its place.
      next->set_served(served_);
      running_.splice(at, waiting_, next);
      next->Start();
      ++active;
      if (gave_way) pools_.push_back(&next->cache().pool());
      if (next->prefix().leads()) leaders_.push_back(&*next);
      continue;
    }
    Request& request = *at++;
    if (request.prefix().leads()) leaders_.push_back(&request);
    if (!gave_way || !Active(request)) continue;
    const BlockPool* const pool = &request.cache().pool();
    const bool is_oldest =
        std::find(pools_.begin(), pools_.end(), pool) == pools_.end();
    if (is_oldest) pools_.push_back(pool);
    if (request.is<Request::Preempted>() &&
        (is_oldest || (ended_since_preempting_ && !catching_up))) {
      request.Start();
      catching_up = true;
    }
  }
}

// Whether the request is to wait for the prefix cache: an earlier request
// computes the beginning of its prompt now, or a tier may have it.
bool RunQueue::TryDelay(Request& request) {
  PrefixUse& prefix = request.prefix();
  if (!prefix.reads()) return false;
  Look(leaders_.size());
  for (Request* const leader : leaders_) {
    if (prefix.Follow(leader->prefix(), wake_up_)) return true;
  }
  if (!prefix.Fetch(wake_up_)) return false;
  const Clock::time_point deadline = prefix.fetch_deadline();
  next_fetch_ = std::min(next_fetch_.value_or(deadline), deadline);
  return true;
}

// Moves delayed requests that wait for the prefix cache no longer back to
// waiting.
void RunQueue::ReleaseDelayed() {
  bool due = next_fetch_ && Clock::now() >= *next_fetch_;
  {
    const MutexLock lock(wake_up_->mutex);
    due |= std::exchange(wake_up_->prefix_changed, false);
  }
  if (!due) return;
  next_fetch_.reset();
  Look(delayed_.size());
  Requests released;
  for (auto at = delayed_.begin(); at != delayed_.end();) {
    const auto request = at++;
    const PrefixUse& prefix = request->prefix();
    if (prefix.fetches()) {
      const Clock::time_point deadline = prefix.fetch_deadline();
      next_fetch_ = std::min(next_fetch_.value_or(deadline), deadline);
    } else if (!prefix.follows()) {
      released.splice(released.end(), delayed_, request);
    }
  }
  released.sort(Older);
  waiting_.merge(released, Older);
}

std::span<Request* const> RunQueue::Runnable() {
  round_.clear();
  round_.reserve(running_.size());
  Look(running_.size());
  for (Request& request : running_) {
    if (request.runnable()) round_.push_back(&request);
  }
  return round_;
}

Request* RunQueue::FindVictim(const Request& request) {
  // One pass for each preemption, which costs far more in what is computed
  // again.
  Request* victim = nullptr;
  for (auto other = settled_.rbegin(); other != settled_.rend(); ++other) {
    if (Older(*other, request)) break;
    if (other->batch() != request.batch() && other->holds_blocks() &&
        SamePool(*other, request)) {
      victim = &*other;
      break;
    }
  }
  bool younger = true;
  for (auto other = running_.rbegin(); other != running_.rend(); ++other) {
    if (&*other == &request) {
      younger = false;
      continue;
    }
    if (other->is<Request::Ended>() || !other->holds_blocks() ||
        !SamePool(*other, request)) {
      continue;
    }
    if (other->stream().waits_for_reader()) return &*other;
    const bool settled_apart = other->is<Request::Settled>() &&
                               other->batch() != request.batch();
    if (younger && (Active(*other) || settled_apart) &&
        (victim == nullptr || Older(*victim, *other))) {
      victim = &*other;
    }
  }
  return victim;
}

bool RunQueue::OlderCompetes(const Request& request) const {
  for (const Request& other : running_) {
    if (&other == &request) return false;
    if (Active(other) && SamePool(other, request)) return true;
  }
  return false;
}

void RunQueue::Preempt(Request& request) {
  request.Preempt();
  ended_since_preempting_ = false;
  ++preemptions_;
}

void RunQueue::FailYoungest(const std::exception_ptr& error) {
  Request* youngest = nullptr;
  for (auto* requests : {&waiting_, &delayed_, &running_}) {
    for (Request& request : *requests) {
      if (Undecided(request) && (!youngest || Older(*youngest, request))) {
        youngest = &request;
      }
    }
  }
  ended_anywhere_ = true;
  if (youngest != nullptr) youngest->Fail(error);
}

}  // namespace gkv
