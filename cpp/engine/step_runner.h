#ifndef GEMMAKV_ENGINE_STEP_RUNNER_H_
#define GEMMAKV_ENGINE_STEP_RUNNER_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/step_clock.h"
#include "base/thread_pool.h"
#include "engine/lookup_history.h"
#include "engine/output_buffer.h"
#include "engine/run_queue.h"
#include "engine/request.h"
#include "engine/side_work.h"
#include "engine/speculation.h"
#include "engine/step_plan.h"
#include "gemmakv/options.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

// Runs the steps of one model.
//
// A step takes a round, the requests that can take rows now, through five
// parts:
//
//   Guess    asks Speculation which guesses the requests are to compute.
//   Plan     has PlanStep choose the rows of each request.
//   Prepare  makes a slice of each request's rows, the oldest's first, and
//            finds the blocks for it. Where a pool is full, it makes room in
//            this order: of the request's guesses, of what the prefix cache
//            holds, of other requests (RunQueue::Victim), of the request itself
//            while older ones compete, of the prefix that it took over, of rows
//            that it need not compute at once. If nothing helps it fails.
//   Compute  runs the model over all slices. Meanwhile constraints say on a
//            side thread which tokens may follow.
//   Deliver  has all requests take their rows at the same time: sample, commit,
//            hand out tokens. Then it ends those that have come to their end.
//
// Between two steps there are no slices, and nothing runs on the side thread. A
// request that fails on the way fails alone. If Run throws, the step has not
// been: no request has taken rows. Belongs to the scheduler's thread, except
// for what is said to be thread-safe.
class StepRunner {
 public:
  // `clock`: null if steps are not timed. Nothing is owned.
  StepRunner(const Model& model, ThreadPool& pool, StepClock* clock,
             const SchedulerOptions& options, RunQueue& queue);
  StepRunner(const StepRunner&) = delete;

  // Runs a step for the round. Returns what it counts as, nullopt if no request
  // got a row.
  std::optional<StepPhase> Run(std::span<Request* const> round);
  // Lets go of what was kept for requests that have ended.
  void ForgetEnded() { speculation_.DropOrphans(); }

  // Thread-safe: steps so far, rows that draft models computed, and what
  // requests of one tenant may be guessed from (see Speculation).
  size_t steps() const { return steps_.load(); }
  size_t draft_rows() const { return speculation_.draft_rows(); }
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return speculation_.HistoryOf(tenant);
  }

 private:
  using Round = std::span<Request* const>;

  void Guess(Round round);
  std::vector<PlannedSlice> Plan(Round round) const;
  void Prepare(Round round, std::vector<PlannedSlice> plan);
  bool PrepareSlice(Request& request, PlannedSlice& plan);
  bool MakeRoom(Request& request, PlannedSlice& plan);
  void Compute();
  void ComputeBesideMasks(std::span<const SequenceSlice> inputs);
  void PlaceStates(std::span<SequenceSlice> inputs);
  void Deliver(StepPhase phase, size_t rows);

  const Model& model_;
  ThreadPool& pool_;
  StepClock* const clock_;
  const SchedulerOptions options_;
  RunQueue& queue_;
  const void* const runner_;  // of InsideStep
  SideWork side_work_;
  Speculation speculation_;
  ForwardPass forward_;
  std::atomic<size_t> steps_{0};

  // Of the step.
  std::vector<Candidate*> candidates_;
  std::vector<StepSlice> slices_;
  OutputBuffer rows_;
  AlignedBuffer<float> states_;  // for drafters, of the rows of logits
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STEP_RUNNER_H_
