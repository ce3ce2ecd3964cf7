#include "engine/scheduler.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/fp_environment.h"
#include "base/inside_step.h"
#include "base/processors.h"
#include "engine/draft_model.h"
#include "engine/guess_plan.h"
#include "engine/target_drafter.h"

namespace gkv {
namespace {

using State = Sequence::State;

// Steps of fewer are bound by reading weights: they do not tell what a row of a
// prompt takes.
constexpr size_t kMeasuredRows = 32;

// A step waits so much of its own time to hear what constraints force.
constexpr double kForcedShare = 0.02;

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
  if (!queue_.Retire()) return;
  // Those that no request can name any more.
  draft_models_.remove_if(
      [](const auto& draft) { return draft->orphaned(); });
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
  const size_t sequences = slices_.size();
  phase_ = only_decodes ? StepPhase::kDecode
           : decodes    ? StepPhase::kMixed
                        : StepPhase::kPrefill;
  Deliver(rows);
  if (only_decodes) {
    step_times_.Note(sequences, guesses, seconds_since(begin) - draft_s_);
  } else {
    step_times_.Restart();
  }
}

// Has the drafters guess, no more than lets all decode in the same step.
void Scheduler::Draft() {
  size_t decoding = 0, guesses = 0;
  bool prefills = false;
  for (const Sequence& sequence : sequences_) {
    if (!sequence.runnable()) continue;
    decoding += sequence.state() == State::kDecoding;
    prefills = prefills || sequence.state() == State::kPrefilling;
  }
  guesses = LookUp(decoding, prefills);
  draft_s_ = 0;
  MakeDraftModels();
  if (prefills || draft_models_.empty()) return;
  const Sequence::Clock::time_point begin = Sequence::Clock::now();
  for (const auto& draft : draft_models_) {
    guesses += DraftByModel(*draft, decoding, guesses);
  }
  draft_s_ = std::chrono::duration<double>(Sequence::Clock::now() - begin)
                 .count();
}

// Of so many sequences that decode, those with drafters of their own, and what
// constraints force. Returns how many guesses the step is to take. A prompt
// makes the most of each row.
size_t Scheduler::LookUp(size_t decoding, bool prefills) {
  const size_t rows = std::min(options_.step_rows, options_.logits_rows);
  std::array<double, StepTimes::kMaxGuesses> extra;
  const std::span room(extra.data(), std::min(rows - std::min(rows, decoding),
                                              extra.size()));
  GuessCosts costs{.tokens = decoding};
  if (options_.always_guess) {
    std::fill(room.begin(), room.end(), 0);
    costs.extra = room;
  } else {
    costs.extra = room.first(step_times_.Extra(decoding, 0, room));
  }
  if (prefills && !options_.always_guess) costs.extra = {};
  forcing_.clear();
  if (CertainGuessesPay(costs)) AskForced();
  for (Sequence& sequence : sequences_) {
    if (!sequence.runnable() || !sequence.has_drafter()) continue;
    try {
      sequence.Draft(MaxGuesses(options_));
    } catch (...) {
      sequence.Fail(std::current_exception());
    }
  }
  if (!forcing_.empty()) TakeForced(decoding);
  size_t guesses = 0;
  try {
    std::vector<Sequence*> sequences;
    std::vector<std::span<const DraftGuess>> proposed;
    for (Sequence& sequence : sequences_) {
      if (!sequence.runnable() || sequence.proposed().empty()) continue;
      sequences.push_back(&sequence);
      proposed.push_back(sequence.proposed());
    }
    const std::vector<size_t> counts = PlanGuesses(proposed, costs);
    for (size_t i = 0; i < counts.size(); ++i) {
      sequences[i]->KeepGuesses(counts[i]);
      guesses += counts[i];
    }
  } catch (const std::bad_alloc&) {
    // Those that have theirs keep them.
  }
  return guesses;
}

// Has constraints asked what they force, on the masks' thread.
void Scheduler::AskForced() {
  try {
    forcing_.reserve(sequences_.size());
    if (!ask_forced_) {
      ask_forced_ = [this] {
        const InsideStep inside(wake_up_.get());
        for (Sequence* sequence : forcing_) {
          sequence->ComputeForced();
          forced_done_.fetch_add(1, std::memory_order_release);
        }
      };
    }
  } catch (const std::bad_alloc&) {
    return;
  }
  for (Sequence& sequence : sequences_) {
    if (sequence.runnable() && sequence.AskForced(MaxGuesses(options_))) {
      forcing_.push_back(&sequence);
    }
  }
  if (forcing_.empty()) return;
  // Where there is time for some of them, not always for the same.
  std::rotate(forcing_.begin(),
              forcing_.begin() +
                  static_cast<ptrdiff_t>(steps_.load() % forcing_.size()),
              forcing_.end());
  forced_done_ = 0;
  try {
    mask_thread_.Begin(ask_forced_);
  } catch (const std::system_error&) {
    ask_forced_();  // no thread is to be had
  }
}

// Has those guess whose constraints have answered in time.
void Scheduler::TakeForced(size_t decoding) {
  if (options_.always_guess) {
    mask_thread_.Wait();
  } else {
    mask_thread_.WaitFor(std::chrono::duration<double>(
        kForcedShare * step_times_.Seconds(decoding)));
  }
  const size_t done = forced_done_.load(std::memory_order_acquire);
  for (size_t i = 0; i < done; ++i) forcing_[i]->GuessForced();
}

// Those that sequences ask for; a sequence for whose there is no memory does
// without.
void Scheduler::MakeDraftModels() {
  for (const Sequence& sequence : sequences_) {
    const std::shared_ptr<const Model>& model = sequence.draft_model();
    if (!model || std::any_of(draft_models_.begin(), draft_models_.end(),
                              [&](const auto& draft) {
                                return draft->model() == model.get();
                              })) {
      continue;
    }
    try {
      if (model->config.target_hidden != 0) {
        draft_models_.push_back(
            std::make_unique<TargetDrafter>(model, *model_, *pool_));
      } else {
        draft_models_.push_back(std::make_unique<DraftModel>(
            model, *model_, *pool_, options_.draft_cache_bytes));
      }
    } catch (const std::bad_alloc&) {
      return;
    }
  }
}

// Has it guess for its sequences, beside so many guesses that there are.
size_t Scheduler::DraftByModel(ModelDrafter& draft, size_t decoding,
                               size_t guesses) {
  const size_t rows = std::min(options_.step_rows, options_.logits_rows);
  const size_t left = rows - std::min(rows, decoding + guesses);
  std::vector<Sequence*> sequences;
  std::vector<ModelDrafter::Request> requests;
  try {
    for (Sequence& sequence : sequences_) {
      if (!sequence.runnable() || sequence.draft_model().get() != draft.model()) {
        continue;
      }
      sequences.reserve(sequences.size() + 1);
      requests.reserve(requests.size() + 1);
      auto request = sequence.ToDraft(MaxGuesses(options_));
      if (!request) continue;
      requests.push_back(std::move(*request));
      sequences.push_back(&sequence);
    }
  } catch (const std::bad_alloc&) {
    return 0;
  }
  if (requests.empty()) return 0;
  std::array<double, StepTimes::kMaxGuesses> extra;
  const std::span room(extra.data(), std::min(left, extra.size()));
  ModelDrafter::Price price{.tokens = decoding,
                            .step_s = step_times_.Seconds(decoding)};
  price.extra = room.first(step_times_.Extra(decoding, guesses, room));
  if (options_.always_guess) {
    std::fill(room.begin(), room.end(), 0);
    price.step_s = 1;
    price.extra = room;
    price.always = true;
  }
  // Others wait for what is read.
  price.rows = decoding > 1 ? options_.step_rows / 4 : options_.step_rows;
  const size_t rows_before = draft.rows();
  size_t made = 0;
  try {
    draft.Guess(requests, price);
    for (size_t i = 0; i < requests.size(); ++i) {
      made += sequences[i]->TakeGuesses(requests[i]);
    }
  } catch (...) {
    for (Sequence* sequence : sequences) {
      sequence->Fail(std::current_exception());
    }
  }
  draft_rows_ += draft.rows() - rows_before;
  return made;
}

// Plans the rows and prepares their slices, those of the oldest first.
void Scheduler::PrepareStep() {
  pool_->Enter(StepPart::kDrafting);
  if (clock_) clock_->Hold(true);
  Draft();
  if (clock_) clock_->Hold(false);
  pool_->Enter(StepPart::kPlanning);
  const std::span<Sequence* const> round = queue_.Runnable();
  std::vector<PlanInput> inputs;
  inputs.reserve(round.size());
  for (Sequence* const sequence : round) inputs.push_back(sequence->ToPlan());
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
