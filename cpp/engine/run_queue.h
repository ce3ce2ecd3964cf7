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

// The requests of one model, from their arrival until they are let go of.
//
// Each is in one of five lists, where the older stands before the younger:
//
//   incoming  Submit put it there, on any thread.
//   waiting   It has had no turn yet, and gets one when there is a place.
//   delayed   It has had no turn, and waits for what the prefix cache is about
//             to have (PrefixUse): it is passed over until then. Unordered.
//   running   It has had its turn. It computes, or gave its blocks back, or
//             waits for its reader, or is done and its reader is behind.
//   settled   It is done, and waits for the others of its batch.
//
// WaitForWork moves arrivals from incoming to waiting. Admit moves them on to
// running, or to delayed and back, and starts again those that gave way. Retire
// moves those that are done from running to settled, and lets go of those that
// have ended, wherever they are. Nothing else moves a request. Its state
// is changed by these, by Interrupt, by Preempt, and by the step.
//
// At most max_running requests compete for steps and blocks (Active). A stream
// that waits for its reader does not, so the running list may be longer. Since
// readers work on other threads, no count can say how many compete now: a pass
// over the running list does, a fixed number of times a step. The other lists
// may be long, and no step looks at them: at one that waits when there is a
// place for it; at all of them when one was stopped, a deadline is over, or a
// batch has failed; at those delayed when the prefix cache says so; at those
// settled when a batch is decided. So the work for a request does not grow with
// the number of the others, unless many wait for the prefix cache: each of its
// answers is a look at all that are delayed.
//
// Where a pool is full, requests give way to older ones: streams that wait for
// their readers first, then the youngest (Victim, Preempt). They start again
// when another one has ended or nothing older of their pool competes. The
// oldest always advances.
//
// What the wake-up's mutex does not guard belongs to the scheduler's thread.
// What ends a request allocates nothing.
class RunQueue {
 public:
  explicit RunQueue(const SchedulerOptions& options) : options_(options) {}
  RunQueue(const RunQueue&) = delete;

  // ---- Any thread ----

  // Takes the requests, all of them from the same step on. Throws QueueFull,
  // taking none, if there are too many, and Busy inside a step of this queue,
  // as by a logits_processor, or where it would be waited for in a circle
  // (StepWait).
  void Submit(std::list<Request>&& requests);
  // Has all requests cancelled. WaitForWork returns false once none is left.
  void Stop();
  const std::shared_ptr<WakeUp>& wake_up() const { return wake_up_; }
  // Requests that gave way so far.
  size_t preemptions() const { return preemptions_.load(); }
  // How often it has looked at a request to find what is to be done.
  size_t looks() const { return looks_.load(); }

  // ---- The loop, in this order ----

  // Sleeps until there is something to do. Returns false when all is over.
  bool WaitForWork();
  // Ends what was stopped, or has run out of time.
  void Interrupt();
  // Lets go of what has ended; returns whether anything has.
  bool Retire();
  // Gives those that wait their turn, in their order, as long as there are
  // places. Of those that gave way it starts the oldest of each pool, or one
  // after the other: the next when the one before is back where it was.
  void Admit();
  // Those that can take rows now, the oldest first. Valid until the next call.
  std::span<Request* const> Runnable();

  // ---- The step ----

  // Notes that the request got rows: it stands after the others now.
  void Serve(Request& request) { request.set_served(++served_); }
  // Who is to give way to the request, the pool of which is full: one that
  // waits for its reader, else one that is younger; of these, the youngest. A
  // batch that does not fit takes nothing from its own that are done. Null:
  // nobody.
  Request* Victim(const Request& request);
  // Whether an older one competes for the same pool.
  bool OlderCompetes(const Request& request) const;
  // Has it give its blocks back. Throws std::bad_alloc, changing nothing.
  void Preempt(Request& request);
  // Fails the youngest of all that are not done: where a step could not be
  // planned or run, the others go on without it.
  void FailYoungest(const std::exception_ptr& error);

  // Those that have had their turn: tests look at them.
  std::list<Request>& running() { return running_; }

 private:
  using Clock = Request::Clock;
  using Requests = std::list<Request>;

  bool HasWork() const REQUIRES(wake_up_->mutex);
  void TakeOver(Requests& arrivals);
  void InterruptAll(Requests& requests);
  void ReleaseDelayed();
  bool Delays(Request& request);
  void EndDecided(Requests& requests);
  static void Move(Requests& from, Requests::iterator what, Requests& to);
  void Look(size_t requests) const {
    looks_.store(looks_.load(std::memory_order_relaxed) + requests,
                 std::memory_order_relaxed);
  }

  const SchedulerOptions options_;
  std::atomic<size_t> preemptions_{0};
  mutable std::atomic<size_t> looks_{0};  // written by the thread alone

  const std::shared_ptr<WakeUp> wake_up_ = std::make_shared<WakeUp>();
  Requests incoming_ GUARDED_BY(wake_up_->mutex);
  // Requests that were taken on.
  size_t unfinished_ GUARDED_BY(wake_up_->mutex) = 0;
  bool stopping_ GUARDED_BY(wake_up_->mutex) = false;

  // The scheduler's thread's own.
  Requests waiting_;
  Requests delayed_;
  Requests running_;
  Requests settled_;
  Requests ended_;         // of Retire, empty before and after
  uint64_t arrivals_ = 0;  // requests that came so far
  uint64_t served_ = 0;    // slices so far, in the order of their service
  bool interrupted_ = false;     // some were told to end early
  bool ended_anywhere_ = false;  // not among running_ alone
  bool ended_since_preempting_ = false;
  // A deadline that is not over yet comes no earlier: a request's, a tier's.
  std::optional<Clock::time_point> next_deadline_;
  std::optional<Clock::time_point> next_fetch_;
  std::vector<const BlockPool*> pools_;  // of Admit
  std::vector<Request*> leaders_;       // of Admit
  std::vector<Request*> round_;         // of Runnable
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_RUN_QUEUE_H_
