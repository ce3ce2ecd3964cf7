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

// The thread that runs all requests of a model. It merges the requests that
// wait into steps, runs the steps, and hands out tokens. Requests join and
// leave between steps.
//
// The scheduler owns the thread and the parts that the thread works with: the
// RunQueue, which holds the requests and decides which of them run, the
// StepRunner, which computes, and the pool of threads that it computes on. The
// loop (Scheduler::Loop) asks the queue what is to be done, has one step run,
// and begins again:
//
//          Submit, readers, deadlines, tiers
//                        |
//                        v
//        +----> RunQueue::WaitForWork   sleeps until there is work
//        |      RunQueue::Interrupt     ends what was stopped or is late
//        |      RunQueue::Retire        removes requests that have ended
//        |      RunQueue::Admit         starts waiting requests
//        |      RunQueue::Runnable      the round: requests that take rows now
//        |      StepRunner::Run         guess, plan, prepare, compute, deliver
//        +----- RunQueue::Retire
//
// A lack of memory ends one request at most. Ending a request allocates
// nothing. Where a round cannot be made or a step cannot be run, the youngest
// request fails with that error and the others continue. The scheduler's
// destructor cancels all requests; the thread ends when none is left.
class Scheduler {
 public:
  // `profiled`: whether steps are timed part by part. With `processors` the
  // threads of the pool stay on these processors, see ThreadPool; throws
  // IoError if the system refuses.
  Scheduler(std::shared_ptr<const Model> model, size_t num_threads,
            const SchedulerOptions& options, bool profiled = false,
            std::span<const Processor> processors = {});
  // Cancels all requests and waits for the thread.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;

  // Runs the requests, which all join at the same step. Thread-safe. Throws as
  // RunQueue::Submit does, and takes none of them then.
  void Submit(std::list<Request>&& requests) {
    queue_.Submit(std::move(requests));
  }

  size_t num_threads() const { return num_threads_; }
  // The number of steps so far. Tests see by it which requests shared a step.
  size_t steps() const { return runner_->steps(); }
  // The number of preemptions so far.
  size_t preemptions() const { return queue_.preemptions(); }
  // The number of parallel loops that the steps took.
  size_t parallel_loops() const { return pool_->parallel_loops(); }
  // Returns where the time of the steps went. Requires: profiled.
  StepProfile profile() const { return clock_->profile(); }
  // Returns the texts from which requests of a tenant are guessed. Thread-safe;
  // the history itself belongs to the scheduler's thread. Throws
  // std::bad_alloc.
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return runner_->HistoryOf(tenant);
  }
  // The number of rows that draft models computed.
  size_t draft_rows() const { return runner_->draft_rows(); }
  // How often the queue has looked at a request to find what is to be done.
  // Tests see by it that this does not grow with the number of waiting
  // requests.
  size_t looks() const { return queue_.looks(); }
  // Says that this thread waits for the scheduler for as long as the result
  // lives; see StepWait.
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
