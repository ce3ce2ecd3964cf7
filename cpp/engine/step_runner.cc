#include "engine/step_runner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/inside_step.h"

namespace gkv {
namespace {

using Clock = std::chrono::steady_clock;

// Steps of fewer rows are bound by reading weights, so they do not tell how
// long a row of a prompt takes.
constexpr size_t kMeasuredRows = 32;

double SecondsSince(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

}  // namespace

StepRunner::StepRunner(const Model& model, ThreadPool& pool, StepClock* clock,
                       const SchedulerOptions& options, RunQueue& queue)
    : model_(model),
      pool_(pool),
      clock_(clock),
      options_(options),
      queue_(queue),
      runner_(queue.wake_up().get()),
      side_work_(runner_),
      speculation_(model, pool, options, side_work_),
      forward_(model, pool) {}

std::optional<StepPhase> StepRunner::Run(Round round) {
  // Side work ends before a request is destroyed.
  struct AtEnd {
    StepRunner& runner;
    ~AtEnd() {
      runner.side_work_.Wait();
      runner.slices_.clear();
    }
  } at_end{*this};
  const Clock::time_point begin = Clock::now();
  Guess(round);
  pool_.Enter(StepPart::kPlanning);
  Prepare(round, Plan(round));
  if (slices_.empty()) return std::nullopt;
  size_t rows = 0, decoding = 0;
  Speculation::Step step{.requests = slices_.size()};
  for (const StepSlice& slice : slices_) {
    rows += slice.ids.size();
    decoding += slice.request->is<Request::Decoding>();
    step.guesses += slice.guesses;
  }
  step.only_decodes = decoding == slices_.size();
  const StepPhase phase = step.only_decodes ? StepPhase::kDecode
                          : decoding > 0    ? StepPhase::kMixed
                                            : StepPhase::kPrefill;
  const Clock::time_point prepared = Clock::now();
  Compute();
  if (rows >= kMeasuredRows) {
    const double row_s = SecondsSince(prepared) / static_cast<double>(rows);
    for (const StepSlice& slice : slices_) {
      slice.request->prefix().NoteSpeed(row_s);
    }
  }
  Deliver(phase, rows);
  step.seconds = SecondsSince(begin);
  speculation_.Note(step);
  return phase;
}

void StepRunner::Guess(Round round) {
  pool_.Enter(StepPart::kDrafting);
  if (clock_) clock_->Hold(true);
  candidates_.clear();
  for (Request* const request : round) {
    candidates_.push_back(&request->ToGuess(MaxGuesses(options_)));
  }
  speculation_.Guess(candidates_);
  if (clock_) clock_->Hold(false);
  for (size_t i = 0; i < round.size(); ++i) {
    if (candidates_[i]->error) round[i]->Fail(candidates_[i]->error);
  }
}

std::vector<PlannedSlice> StepRunner::Plan(Round round) const {
  std::vector<PlanInput> inputs;
  inputs.reserve(round.size());
  for (const Request* const request : round) {
    inputs.push_back(request->runnable() ? request->ToPlan() : PlanInput{});
  }
  return PlanStep(inputs, options_);
}

void StepRunner::Prepare(Round round, std::vector<PlannedSlice> plan) {
  slices_.reserve(plan.size());
  for (PlannedSlice& slice : plan) {
    Request& request = *round[slice.request];
    // The request may have been preempted for an older one meanwhile.
    while (request.runnable() && !PrepareSlice(request, slice)) {
    }
  }
}

// Returns false if the caller is to try again.
bool StepRunner::PrepareSlice(Request& request, PlannedSlice& plan) {
  const ModelConfig& config = model_.config;
  try {
    slices_.push_back(
        request.Prepare(plan, config.vocab_size, config.hidden_size));
    queue_.Serve(request);
  } catch (const CacheFull&) {
    if (MakeRoom(request, plan)) return false;
    if (!request.is<Request::Preempted>()) {
      request.Fail(std::current_exception());
    }
  } catch (...) {
    request.Fail(std::current_exception());
  }
  return true;
}

// Returns true if there is more room now, or the plan asks for less. Returns
// false if nothing helps or the request itself was preempted.
bool StepRunner::MakeRoom(Request& request, PlannedSlice& plan) {
  // Guesses preempt and fail nobody.
  if (request.DropGuesses(plan)) return true;
  // Otherwise blocks that the index shares with running requests are copied.
  if (request.prefix().GiveUpIndexed()) return true;
  if (Request* const victim = queue_.FindVictim(request)) {
    queue_.Preempt(*victim);
    return true;
  }
  // What the request took over from the prefix cache, or copied because the
  // index shared it, may be one block more than it needs alone.
  if (queue_.OlderCompetes(request) ||
      (request.holds_blocks() && request.prefix().Leave())) {
    queue_.Preempt(request);
    return false;
  }
  // A request that catches up in large steps may have got there in small ones.
  if (request.catching_up() && plan.end - plan.begin > 1) {
    plan.end -= (plan.end - plan.begin) / 2;
    return true;
  }
  return false;
}

void StepRunner::Compute() {
  std::vector<SequenceSlice> inputs;
  inputs.reserve(slices_.size());
  std::vector<RowOutput*> outputs;
  outputs.reserve(slices_.size());
  for (StepSlice& slice : slices_) outputs.push_back(&slice.output);
  rows_.Place(outputs, model_.config);
  bool masks = false;
  for (const StepSlice& slice : slices_) {
    inputs.push_back({slice.ids, &slice.view, &slice.request->cache().layout(),
                      slice.output});
    masks = masks || !slice.masks.empty();
  }
  PlaceStates(inputs);
  if (masks) {
    ComputeBesideMasks(inputs);
  } else {
    forward_.Step(inputs);
  }
  ++steps_;
}

void StepRunner::ComputeBesideMasks(std::span<const SequenceSlice> inputs) {
  const std::function<void()> compute = [this] {
    for (StepSlice& slice : slices_) {
      if (!slice.masks.empty()) slice.request->ComputeMasks(slice);
    }
  };
  // `compute` must live until the side work has ended, even if the step throws.
  struct AtEnd {
    SideWork& side_work;
    ~AtEnd() { side_work.Wait(); }
  } at_end{side_work_};
  side_work_.Begin(compute);
  forward_.Step(inputs);
  pool_.Enter(StepPart::kMasks);
}

// Makes room for the hidden states that drafters read. If there is no memory,
// they make no guesses.
void StepRunner::PlaceStates(std::span<SequenceSlice> inputs) {
  const size_t hidden = model_.config.hidden_size;
  size_t rows = 0;
  for (const StepSlice& slice : slices_) {
    if (slice.wants_states) rows += slice.output.rows;
  }
  if (rows == 0) return;
  try {
    states_.EnsureSize(rows * hidden);
  } catch (const std::bad_alloc&) {
    return;
  }
  float* state = states_.data();
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!slices_[i].wants_states) continue;
    inputs[i].output.states = slices_[i].output.states = state;
    state += slices_[i].output.rows * hidden;
  }
}

// `rows`: the rows of the step.
void StepRunner::Deliver(StepPhase phase, size_t rows) {
  pool_.Enter(StepPart::kSampling);
  if (clock_) clock_->End(phase, rows);
  // A loop of one task runs on this thread and leaves the pool to the task.
  ThreadPool* const free_pool = slices_.size() == 1 ? &pool_ : nullptr;
  pool_.Run(slices_.size(), [&](size_t i, size_t) {
    const InsideStep inside(runner_);
    slices_[i].request->TakeRows(slices_[i], free_pool);
  });
  pool_.Enter(StepPart::kPlanning);
  if (clock_) clock_->AddRest(phase);
  for (StepSlice& slice : slices_) slice.request->Conclude(slice);
}

}  // namespace gkv
