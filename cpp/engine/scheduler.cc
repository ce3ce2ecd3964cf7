#include "engine/scheduler.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fp_environment.h"
#include "base/inside_step.h"
#include "base/processors.h"

namespace gkv {
namespace {

using State = Sequence::State;

// Steps of fewer are bound by reading weights: they do not tell what a row of a
// prompt takes.
constexpr size_t kMeasuredRows = 32;

}  // namespace

Scheduler::Scheduler(std::shared_ptr<const Model> model, size_t num_threads,
                     const SchedulerOptions& options, bool profiled,
                     std::span<const Processor> processors)
    : model_(std::move(model)),
      num_threads_(num_threads),
      options_(options),
      queue_(options),
      clock_(profiled ? std::make_unique<StepClock>() : nullptr) {
  pool_ = std::make_unique<ThreadPool>(num_threads, processors);
  pool_->set_clock(clock_.get());
  forward_ = std::make_unique<ForwardPass>(*model_, *pool_);
  speculation_ = std::make_unique<Speculation>(*model_, *pool_, options_,
                                               mask_thread_, wake_up_.get());
  std::promise<void> pinned;
  std::future<void> ready = pinned.get_future();
  thread_ = std::thread(
      Unpinned([this, processors, pinned = std::move(pinned)]() mutable {
        Loop(processors, pinned);
      }));
  try {
    ready.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Scheduler::~Scheduler() {
  queue_.Stop();
  thread_.join();
}

// `pinned` is told when the thread is where it computes, or why it is not.
void Scheduler::Loop(std::span<const Processor> processors,
                     std::promise<void>& pinned) {
  std::unique_ptr<ScopedPin> pin;
  try {
    pin = PinTo(processors);
  } catch (...) {
    pinned.set_exception(std::current_exception());
    return;
  }
  pinned.set_value();
  const InsideStep inside(wake_up_.get());
  const ScopedFpEnvironment fp_environment;
  while (queue_.WaitForWork()) {
    if (clock_) clock_->Begin();
    phase_.reset();
    queue_.Interrupt();
    Retire();
    try {
      queue_.Admit();
      RunStep();
    } catch (...) {
      slices_.clear();
      queue_.FailYoungest(std::current_exception());
    }
    Retire();
    if (clock_ && phase_) clock_->AddRest(*phase_);
  }
}

void Scheduler::Retire() {
  if (queue_.Retire()) speculation_->DropOrphans();
}

void Scheduler::RunStep() {
  // What constraints were asked ends before any sequence does.
  struct WaitsAtEnd {
    SideThread& thread;
    ~WaitsAtEnd() { thread.Wait(); }
  } waits{mask_thread_};
  const Sequence::Clock::time_point begin = Sequence::Clock::now();
  PrepareStep();
  if (slices_.empty()) return;
  size_t rows = 0, guesses = 0;
  bool only_decodes = true, decodes = false;
  for (const StepSlice& slice : slices_) {
    rows += slice.ids.size();
    guesses += slice.guesses;
    const bool decoding = slice.sequence->state() == State::kDecoding;
    only_decodes = only_decodes && decoding;
    decodes = decodes || decoding;
  }
  const auto seconds_since = [](Sequence::Clock::time_point time) {
    return std::chrono::duration<double>(Sequence::Clock::now() - time).count();
  };
  const Sequence::Clock::time_point prepared = Sequence::Clock::now();
  RunModel();
  if (rows >= kMeasuredRows) {
    const double seconds = seconds_since(prepared);
    for (const StepSlice& slice : slices_) {
      slice.sequence->prefix().NoteSpeed(seconds / static_cast<double>(rows));
    }
  }
  Speculation::Step step{.requests = slices_.size(),
                         .guesses = guesses,
                         .only_decodes = only_decodes};
  phase_ = only_decodes ? StepPhase::kDecode
           : decodes    ? StepPhase::kMixed
                        : StepPhase::kPrefill;
  Deliver(rows);
  step.seconds = seconds_since(begin);
  speculation_->Note(step);
}

// Plans the rows and prepares their slices, those of the oldest first.
void Scheduler::PrepareStep() {
  pool_->Enter(StepPart::kDrafting);
  if (clock_) clock_->Hold(true);
  const std::span<Sequence* const> round = queue_.Runnable();
  candidates_.clear();
  for (Sequence* const sequence : round) {
    candidates_.push_back(&sequence->ToGuess(MaxGuesses(options_)));
  }
  speculation_->Guess(candidates_);
  if (clock_) clock_->Hold(false);
  pool_->Enter(StepPart::kPlanning);
  std::vector<PlanInput> inputs;
  inputs.reserve(round.size());
  for (Sequence* const sequence : round) {
    if (sequence->guess_error()) {
      sequence->Fail(sequence->guess_error());
      inputs.push_back({});
    } else {
      inputs.push_back(sequence->ToPlan());
    }
  }
  std::vector<PlannedSlice> plan = PlanStep(inputs, options_);
  slices_.reserve(plan.size());
  for (PlannedSlice& slice : plan) {
    Sequence& sequence = *round[slice.sequence];
    // It may have given way to an older one meanwhile.
    while (sequence.runnable() && !PrepareSlice(sequence, slice)) {
    }
  }
}

// False if it is to be tried again, now that there is more room, or less asked
// for: whoever comes back in large steps may have got there in small ones.
bool Scheduler::PrepareSlice(Sequence& sequence, PlannedSlice& plan) {
  const ModelConfig& config = model_->config;
  try {
    slices_.push_back(
        sequence.Prepare(plan, config.vocab_size, config.hidden_size));
    queue_.Serve(sequence);
    return true;
  } catch (const CacheFull&) {
    // No conversation gives way to guesses, nor fails for them.
    if (sequence.DropGuesses(plan)) return false;
    // What is shared with those that run must not be copied then.
    if (sequence.prefix().GiveUpIndexed()) return false;
    if (Sequence* const victim = queue_.Victim(sequence)) {
      queue_.Preempt(*victim);
      return false;
    }
    if (queue_.OlderCompetes(sequence)) {
      queue_.Preempt(sequence);
      return true;
    }
    if (sequence.LeavePrefix()) {
      queue_.Preempt(sequence);
      return true;
    }
    if (sequence.catching_up() && plan.end - plan.begin > 1) {
      plan.end -= (plan.end - plan.begin) / 2;
      return false;
    }
    sequence.Fail(std::current_exception());
  } catch (...) {
    sequence.Fail(std::current_exception());
  }
  return true;
}

// Runs the step. Masks are made meanwhile.
void Scheduler::RunModel() {
  std::vector<SequenceSlice> inputs;
  inputs.reserve(slices_.size());
  std::vector<RowOutput*> outputs;
  outputs.reserve(slices_.size());
  for (StepSlice& slice : slices_) outputs.push_back(&slice.output);
  rows_.Place(outputs, model_->config);
  bool masks = false;
  for (const StepSlice& slice : slices_) {
    inputs.push_back({slice.ids, &slice.view, &slice.sequence->cache().layout(),
                      slice.output});
    masks = masks || !slice.masks.empty();
  }
  PlaceStates(inputs);
  if (!masks) {
    forward_->Step(inputs);
  } else {
    const std::function<void()> compute = [this] {
      const InsideStep inside(wake_up_.get());
      for (StepSlice& slice : slices_) {
        if (!slice.masks.empty()) slice.sequence->ComputeMasks(slice);
      }
    };
    try {
      mask_thread_.Begin(compute);
    } catch (const std::system_error&) {
      compute();  // no thread is to be had
    }
    std::exception_ptr error;
    try {
      forward_->Step(inputs);
    } catch (...) {
      error = std::current_exception();
    }
    pool_->Enter(StepPart::kMasks);
    mask_thread_.Wait();
    if (error) std::rethrow_exception(error);
  }
  ++steps_;
}

// Room for what drafters go on from. Where there is none, they make no guesses.
void Scheduler::PlaceStates(std::span<SequenceSlice> inputs) {
  const size_t hidden = model_->config.hidden_size;
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

// Of a step of so many rows.
void Scheduler::Deliver(size_t rows) {
  pool_->Enter(StepPart::kSampling);
  if (clock_) clock_->End(*phase_, rows);
  // A loop of one task runs here, and leaves the pool to the task.
  ThreadPool* const free_pool = slices_.size() == 1 ? pool_.get() : nullptr;
  pool_->Run(slices_.size(), [&](size_t i, size_t) {
    const InsideStep inside(wake_up_.get());
    slices_[i].sequence->TakeRows(slices_[i], free_pool);
  });
  pool_->Enter(StepPart::kPlanning);
  if (clock_) clock_->AddRest(*phase_);
  for (const StepSlice& slice : slices_) slice.sequence->Conclude();
  slices_.clear();
}

}  // namespace gkv
