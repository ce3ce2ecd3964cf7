#ifndef GEMMAKV_ENGINE_RUN_QUEUE_H_
#define GEMMAKV_ENGINE_RUN_QUEUE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"
#include "engine/token_stream.h"
#include "gemmakv/options.h"

namespace gkv {

// The requests of one model, from their arrival to their removal.
//
// Each request is in one of five lists. All but delayed are in the order of
// arrival:
//
//   incoming  Submit put it there, on any thread.
//   waiting   It has not started, and starts when there is a place.
//   delayed   It has not started, and waits for a prefix that the prefix cache
//             is about to have (PrefixUse). Admit passes it over until then.
//   running   It has started. It computes, or was preempted, or waits for its
//             reader, or is done and its reader has tokens left to read.
//   settled   It is done, and waits for the rest of its batch.
//
// WaitForWork moves requests from incoming to waiting. Admit moves them on to
// running, or to delayed and back to waiting, and restarts preempted requests.
// Retire moves a request that is done but not at its end to settled if it
// belongs to a batch, else to running, and removes requests that have ended,
// from every list. Nothing else moves a request. The functions that change the
// state of a request are these, Interrupt, Preempt, FailYoungest, and the step.
//
// A request is admitted while fewer than max_running compete for steps and
// blocks (Active). A stream that waits for its reader does not compete, so the
// running list may be longer. Readers work on other threads, so no counter can
// say how many requests compete now: a pass over the running list counts them,
// a fixed number of times a step. The other lists may be long, and no step
// passes over them. The queue looks at a waiting request when there is a place
// for it; at all waiting and delayed requests when one was stopped, a deadline
// has passed, or a batch or a round has failed; at the delayed ones when the
// prefix cache has news; at the settled ones when a batch is decided. So the
// work for a request does not grow with the number of the others, unless many
// wait for the prefix cache: each of its answers is a look at all delayed
// requests.
//
// Where a pool is full, requests are preempted: first streams that wait for
// their readers, then the youngest (FindVictim, Preempt). A preempted request
// restarts when another one has ended or no older request of its pool competes.
// The oldest always advances.
//
// Everything that the WakeUp's mutex does not guard belongs to the scheduler's
// thread. Ending a request allocates nothing.
class RunQueue {
 public:
  explicit RunQueue(const SchedulerOptions& options) : options_(options) {}
  RunQueue(const RunQueue&) = delete;

  // ---- Any thread ----

  // Takes the requests, which all join at the same step. Throws QueueFull if
  // there are too many, and Busy inside a step of this queue, as from a
  // logits_processor, or where waiting for them would close a circle of waits
  // (StepWait). Takes none of them if it throws.
  void Submit(std::list<Request>&& requests);
  // Has all requests cancelled. WaitForWork returns false when none is left.
  void Stop();
  const std::shared_ptr<WakeUp>& wake_up() const { return wake_up_; }
  // The number of preemptions so far.
  size_t preemptions() const { return preemptions_.load(); }
  // How often the queue has looked at a request to find what is to be done.
  size_t looks() const { return looks_.load(); }

  // ---- The loop, in this order ----

  // Sleeps until there is something to do. Returns false when the queue was
  // stopped and is empty.
  bool WaitForWork();
  // Ends requests that were stopped or whose deadline has passed.
  void Interrupt();
  // Removes requests that have ended. Returns whether there were any.
  bool Retire();
  // Starts waiting requests in their order, as long as there are places.
  // Restarts preempted requests: the oldest of each pool, or one after the
  // other, each when the one before has computed what it gave back.
  void Admit();
  // Returns the requests that can take rows now, the oldest first. Valid until
  // the next call.
  std::span<Request* const> Runnable();

  // ---- The step ----

  // Notes that the request got rows: in the next steps the others come first.
  void Serve(Request& request) { request.set_served(++served_); }
  // Returns the request to preempt for `request`, whose pool is full: a stream
  // that waits for its reader, else a younger request; of these, the youngest.
  // A batch that does not fit takes nothing from those of its own requests that
  // are done. Returns null if there is none.
  Request* FindVictim(const Request& request);
  // Whether an older request competes for the same pool.
  bool OlderCompetes(const Request& request) const;
  // Has the request give its blocks back. Throws std::bad_alloc, changing
  // nothing.
  void Preempt(Request& request);
  // Fails the youngest request that is not done. For a step that could not be
  // planned or run: the others continue without it.
  void FailYoungest(const std::exception_ptr& error);

  // The requests that have started, for tests.
  std::list<Request>& running() { return running_; }

 private:
  using Clock = Request::Clock;
  using Requests = std::list<Request>;

  bool HasWork() const REQUIRES(wake_up_->mutex);
  void TakeOver(Requests& arrivals);
  void InterruptAll(Requests& requests);
  void ReleaseDelayed();
  bool TryDelay(Request& request);
  void EndDecided(Requests& requests);
  static void Move(Requests& from, Requests::iterator what, Requests& to);
  void Look(size_t requests) const {
    looks_.store(looks_.load(std::memory_order_relaxed) + requests,
                 std::memory_order_relaxed);
  }

  const SchedulerOptions options_;
  std::atomic<size_t> preemptions_{0};
  // written by the scheduler's thread alone
  mutable std::atomic<size_t> looks_{0};

  const std::shared_ptr<WakeUp> wake_up_ = std::make_shared<WakeUp>();
  Requests incoming_ GUARDED_BY(wake_up_->mutex);
  // Requests in all lists.
  size_t unfinished_ GUARDED_BY(wake_up_->mutex) = 0;
  bool stopping_ GUARDED_BY(wake_up_->mutex) = false;

  // These belong to the scheduler's thread.
  Requests waiting_;
  Requests delayed_;
  Requests running_;
  Requests settled_;
  Requests ended_;         // scratch of Retire, empty between calls
  uint64_t arrivals_ = 0;  // requests so far
  uint64_t served_ = 0;    // slices so far; a request's place in that order
  bool interrupted_ = false;     // a stream was told to end early
  bool ended_anywhere_ = false;  // a request ended that may not be in running_
  bool ended_since_preempting_ = false;
  // No deadline of a request, and none of a tier, comes before these.
  std::optional<Clock::time_point> next_deadline_;
  std::optional<Clock::time_point> next_fetch_;
  std::vector<const BlockPool*> pools_;  // of Admit
  std::vector<Request*> leaders_;       // of Admit
  std::vector<Request*> round_;         // of Runnable
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_RUN_QUEUE_H_
