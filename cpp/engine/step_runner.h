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
// A step takes a round, which is the requests that can take rows now, through
// five parts:
//
//   Guess    asks Speculation which guesses the requests are to compute.
//   Plan     has PlanStep choose the rows of each request.
//   Prepare  makes a slice of each request's rows, in the order of the round,
//            and acquires its blocks. Where a pool is full, MakeRoom frees
//            blocks or asks for fewer, in this order: it drops the request's
//            guesses; has the prefix cache give up entries; preempts another
//            request (RunQueue::FindVictim); preempts the request itself if
//            older ones compete, or to go on without the prefix that it took
//            over; halves the rows of a request that catches up. If nothing
//            helps, the request fails.
//   Compute  runs the model over all slices. Meanwhile constraints compute on a
//            side thread which tokens may follow.
//   Deliver  has all requests take their rows in parallel: sample, commit, hand
//            out tokens. Then it settles the requests that are done and fails
//            those that threw.
//
// Between two steps there are no slices, and nothing runs on the side thread. A
// request that fails during a step fails alone. If Run throws, no request has
// taken rows. The runner belongs to the scheduler's thread, except for the
// functions that are said to be thread-safe.
class StepRunner {
 public:
  // `clock`: null if steps are not timed. The arguments are not owned.
  StepRunner(const Model& model, ThreadPool& pool, StepClock* clock,
             const SchedulerOptions& options, RunQueue& queue);
  StepRunner(const StepRunner&) = delete;

  // Runs a step for the round. Returns the phase that it counts as, or nullopt
  // if no request got a row.
  std::optional<StepPhase> Run(std::span<Request* const> round);
  // Drops what was kept for requests that have ended.
  void ForgetEnded() { speculation_.DropOrphans(); }

  // Thread-safe: the number of steps so far, the number of rows that draft
  // models computed, and the texts from which a tenant's requests are guessed.
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

  // These are of the current step.
  std::vector<Candidate*> candidates_;
  std::vector<StepSlice> slices_;
  OutputBuffer rows_;
  // hidden states of the rows of logits, for drafters
  AlignedBuffer<float> states_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STEP_RUNNER_H_
