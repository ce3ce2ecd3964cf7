#ifndef GEMMAKV_ENGINE_SCHEDULER_H_
#define GEMMAKV_ENGINE_SCHEDULER_H_

#include <cstddef>
#include <future>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "base/step_clock.h"
#include "base/thread_pool.h"
#include "engine/run_queue.h"
#include "engine/request.h"
#include "engine/step_runner.h"
#include "engine/step_wait.h"
#include "gemmakv/options.h"
#include "model/forward.h"

namespace gkv {

// The thread that runs all requests of a model. It merges whatever waits into
// steps, runs them, and hands out tokens; requests join and leave between
// steps.
//
// The scheduler owns the thread, and what the thread works with: the RunQueue,
// which has the requests and decides who runs, the StepRunner, which computes,
// and the pool of threads that it computes on. The loop (Scheduler::Loop) asks
// the queue what is to be done, has one step run, and begins again:
//
//          Submit, readers, deadlines, tiers
//                        |
//                        v
//        +----> RunQueue::WaitForWork   sleeps until there is work
//        |      RunQueue::Interrupt     ends what was stopped or is late
//        |      RunQueue::Retire        lets go of what has ended
//        |      RunQueue::Admit         gives those that wait their turn
//        |      RunQueue::Runnable      the round: who can take rows now
//        |      StepRunner::Run         guess, plan, prepare, compute, deliver
//        +----- RunQueue::Retire
//
// No lack of memory ends more than a request: what ends a request allocates
// nothing, and where a round cannot be made or a step cannot be run, the
// youngest request fails with that and the others go on. The thread ends when
// the scheduler does, once all requests are cancelled.
class Scheduler {
 public:
  // `profiled`: whether its steps are timed part by part. With `processors` the
  // pool's threads stay on them, see ThreadPool; throws IoError if the system
  // refuses.
  Scheduler(std::shared_ptr<const Model> model, size_t num_threads,
            const SchedulerOptions& options, bool profiled = false,
            std::span<const Processor> processors = {});
  // Cancels what is running and waits for the thread.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;

  // Runs the requests, all of them from the same step on. Thread-safe; throws
  // as RunQueue::Submit does, taking none.
  void Submit(std::list<Request>&& requests) {
    queue_.Submit(std::move(requests));
  }

  size_t num_threads() const { return num_threads_; }
  // Steps run so far: tests see merging by it.
  size_t steps() const { return runner_->steps(); }
  // Requests that gave way so far.
  size_t preemptions() const { return queue_.preemptions(); }
  // Parallel loops that the steps took.
  size_t parallel_loops() const { return pool_->parallel_loops(); }
  // Where their time went. Requires: profiled.
  StepProfile profile() const { return clock_->profile(); }
  // What requests of one tenant may be guessed from. Thread-safe; what it gives
  // is this thread's. Throws std::bad_alloc.
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return runner_->HistoryOf(tenant);
  }
  // Rows that draft models computed.
  size_t draft_rows() const { return runner_->draft_rows(); }
  // How often it has looked at a request to find what is to be done: tests see
  // by it that this does not grow with the number of those that wait.
  size_t looks() const { return queue_.looks(); }
  // This thread waits for it until the end of what this returns; see StepWait.
  StepWait Waiting() const { return StepWait(queue_.wake_up().get()); }

 private:
  void RunThread(std::span<const Processor> processors,
                 std::promise<void>& pinned);
  void Loop();
  void Retire();

  const std::shared_ptr<const Model> model_;
  const size_t num_threads_;
  const std::unique_ptr<StepClock> clock_;  // null: not profiled
  RunQueue queue_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<StepRunner> runner_;
  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SCHEDULER_H_
