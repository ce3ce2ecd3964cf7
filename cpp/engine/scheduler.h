#ifndef GEMMAKV_ENGINE_SCHEDULER_H_
#define GEMMAKV_ENGINE_SCHEDULER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/step_clock.h"
#include "base/thread_pool.h"
#include "engine/output_buffer.h"
#include "engine/run_queue.h"
#include "engine/sequence.h"
#include "engine/side_thread.h"
#include "engine/speculation.h"
#include "engine/step_wait.h"
#include "gemmakv/options.h"
#include "model/forward.h"

namespace gkv {

// One thread that drives all sequences of a model: merges whatever waits into
// steps, runs them, hands out tokens. Sequences join and leave between steps.
// Which of them run, and who gives way where a pool is full, is RunQueue's to
// say.
//
// No lack of memory ends more than a request: what ends a sequence allocates
// nothing, and where a step cannot be planned or run for want of memory, the
// youngest sequence fails with that and the others go on.
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

  // See RunQueue::Submit. Thread-safe.
  void Submit(std::list<Sequence>&& sequences) {
    queue_.Submit(std::move(sequences));
  }

  size_t num_threads() const { return num_threads_; }
  // Steps run so far: tests see merging by it.
  size_t steps() const { return steps_.load(); }
  // Sequences that gave way so far.
  size_t preemptions() const { return queue_.preemptions(); }
  // Parallel loops that the steps took.
  size_t parallel_loops() const { return pool_->parallel_loops(); }
  // Where their time went. Requires: profiled.
  StepProfile profile() const { return clock_->profile(); }
  // What requests of one tenant may be guessed from. Thread-safe; what it gives
  // is this thread's. Throws std::bad_alloc.
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return speculation_->HistoryOf(tenant);
  }
  // Rows that draft models computed.
  size_t draft_rows() const { return speculation_->draft_rows(); }
  // How often it has looked at a sequence, to find what is to be done: tests
  // see by it that this does not grow with the number of those that wait.
  size_t looks() const { return queue_.looks(); }
  // This thread waits for it until the end of what this returns; see StepWait.
  StepWait Waiting() const { return StepWait(wake_up_.get()); }

 private:
  void Loop(std::span<const Processor> processors, std::promise<void>& pinned);
  void Retire();
  void RunStep();
  void PrepareStep();
  bool PrepareSlice(Sequence& sequence, PlannedSlice& plan);
  void RunModel();
  void PlaceStates(std::span<SequenceSlice> inputs);
  void Deliver(size_t rows);

  const std::shared_ptr<const Model> model_;
  const size_t num_threads_;
  const SchedulerOptions options_;
  std::atomic<size_t> steps_{0};
  RunQueue queue_;
  const std::shared_ptr<WakeUp> wake_up_ = queue_.wake_up();

  const std::unique_ptr<StepClock> clock_;  // null: not profiled

  // The thread's own.
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ForwardPass> forward_;
  std::vector<StepSlice> slices_;  // of the step
  std::optional<StepPhase> phase_;  // what the step counts as, once it was run
  OutputBuffer rows_;
  AlignedBuffer<float> states_;  // for drafters, of the step's rows of logits
  SideThread mask_thread_;
  std::unique_ptr<Speculation> speculation_;
  std::vector<Candidate*> candidates_;  // of the step

  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SCHEDULER_H_
