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
#include "engine/sequence.h"
#include "engine/side_thread.h"
#include "engine/speculation.h"
#include "engine/step_wait.h"
#include "gemmakv/options.h"
#include "model/forward.h"

namespace gkv {

// One thread that drives all sequences of a model: merges whatever waits into
// steps, runs them, hands out tokens. Sequences join and leave between steps.
//
// Where a pool is full, sequences give way to older ones: streams that wait for
// their readers first, then the youngest. They give back the blocks that they
// filled, and compute the same again when another one has ended or nothing
// older runs. The oldest always advances; it fails if the pool has no room for
// it alone.
//
// A sequence is in one of three lists, each with the oldest first: it waits for
// its turn, it has had it, or it is done and waits for the others of its batch.
// A step looks at those alone that have had their turn, of which there are a
// bounded number but for streams that wait for their readers; at one that waits
// when there is a place for it, or it was stopped, or a deadline is over, or its
// batch has failed; at those that are done when a batch is decided. So the work for a request does
// not grow with the number of requests that wait.
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

  // Starts driving the sequences, all of them from the same step on. Throws
  // QueueFull, taking none, if there are too many, and Busy inside a step of
  // this scheduler, as by a logits_processor, or where it would be waited for
  // in a circle (StepWait). Thread-safe.
  void Submit(std::list<Sequence>&& sequences);

  size_t num_threads() const { return num_threads_; }
  // Steps run so far: tests see merging by it.
  size_t steps() const { return steps_.load(); }
  // Sequences that gave way so far.
  size_t preemptions() const { return preemptions_.load(); }
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
  size_t looks() const { return looks_.load(); }
  // This thread waits for it until the end of what this returns; see StepWait.
  StepWait Waiting() const { return StepWait(wake_up_.get()); }

 private:
  void Loop(std::span<const Processor> processors, std::promise<void>& pinned);
  bool WaitForWork();
  void TakeOver(std::list<Sequence>& arrivals);
  bool HasWork() const;
  std::optional<Sequence::Clock::time_point> NextDeadline() const;
  bool FollowsAnother(Sequence& sequence);
  void Interrupt();
  void InterruptAll(std::list<Sequence>& sequences);
  void StartSequences();
  void DropEnded();
  void EndSettled(std::list<Sequence>& sequences);
  static void Move(std::list<Sequence>& from,
                   std::list<Sequence>::iterator what, std::list<Sequence>& to);
  void FailYoungest(const std::exception_ptr& error);
  Sequence* YoungestSettled(const Sequence& sequence);
  void Look(size_t sequences) const {
    looks_.store(looks_.load(std::memory_order_relaxed) + sequences,
                 std::memory_order_relaxed);
  }
  void RunStep();
  void PrepareStep();
  bool PrepareSlice(Sequence& sequence, PlannedSlice& plan);
  bool MakeRoom(Sequence& sequence);
  void Preempt(Sequence& sequence);
  void RunModel();
  void PlaceStates(std::span<SequenceSlice> inputs);
  void Deliver(size_t rows);

  const std::shared_ptr<const Model> model_;
  const size_t num_threads_;
  const SchedulerOptions options_;
  std::atomic<size_t> steps_{0};
  std::atomic<size_t> preemptions_{0};
  mutable std::atomic<size_t> looks_{0};  // written by the thread alone

  // Guards what follows.
  const std::shared_ptr<WakeUp> wake_up_ = std::make_shared<WakeUp>();
  std::list<Sequence> incoming_;
  size_t unfinished_ = 0;  // sequences that were taken on
  bool stopping_ = false;

  const std::unique_ptr<StepClock> clock_;  // null: not profiled

  // The thread's own.
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ForwardPass> forward_;
  // Each with the oldest first.
  std::list<Sequence> waiting_;  // kWaiting
  // The others, but for those of batches that are kSettled.
  std::list<Sequence> sequences_;
  std::list<Sequence> settled_;  // these
  std::list<Sequence> ended_;    // of DropEnded, empty before and after
  uint64_t arrivals_ = 0;        // sequences that came so far
  bool interrupted_ = false;     // some were told to end early
  // A deadline that is not over yet comes no earlier.
  std::optional<Sequence::Clock::time_point> next_deadline_;
  bool ended_anywhere_ = false;          // not among sequences_ alone
  std::vector<const BlockPool*> pools_;  // of StartSequences
  bool ended_since_preempting_ = false;
  uint64_t served_ = 0;  // slices so far, in the order of their service
  std::vector<StepSlice> slices_;  // of the step
  std::optional<StepPhase> phase_;  // what the step counts as, once it was run
  OutputBuffer rows_;
  AlignedBuffer<float> states_;  // for drafters, of the step's rows of logits
  SideThread mask_thread_;
  std::unique_ptr<Speculation> speculation_;
  std::vector<Candidate*> round_;  // of the step

  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SCHEDULER_H_
