#include "engine/scheduler.h"

#include <algorithm>
#include <functional>
#include <limits>
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

// Competes for the blocks of its pool, now or when others let it.
bool Active(const Sequence& sequence) {
  const State state = sequence.state();
  return (state == State::kPrefilling || state == State::kDecoding ||
          state == State::kPreempted) &&
         !sequence.stream().waits_for_reader();
}

bool SamePool(const Sequence& a, const Sequence& b) {
  return &a.cache().pool() == &b.cache().pool();
}

bool Undecided(const Sequence& sequence) {
  return sequence.state() != State::kSettled &&
         sequence.state() != State::kEnded;
}

}  // namespace

Scheduler::Scheduler(std::shared_ptr<const Model> model, size_t num_threads,
                     const SchedulerOptions& options, bool profiled,
                     std::span<const Processor> processors)
    : model_(std::move(model)),
      num_threads_(num_threads),
      options_(options),
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
  {
    const std::lock_guard lock(wake_up_->mutex);
    stopping_ = true;
  }
  wake_up_->changed.notify_all();
  thread_.join();
}

void Scheduler::Submit(std::list<Sequence>&& sequences) {
  StepWait::CheckNotInside(wake_up_.get());
  for (const Sequence& sequence : sequences) {
    TokenStream& stream = sequence.stream();
    stream.set_wake_up(wake_up_);
    // Whoever makes it waits for its end.
    if (!stream.streamed()) stream.PrepareToWait();
  }
  {
    const std::lock_guard lock(wake_up_->mutex);
    const size_t limit =
        options_.max_running +
        std::min(options_.max_queued,
                 std::numeric_limits<size_t>::max() - options_.max_running);
    if (unfinished_ + sequences.size() > limit) {
      throw QueueFull(StrCat("the model: ", unfinished_, " requests run or ",
                             "wait and ", sequences.size(),
                             " more are asked for, expected at most ", limit,
                             " in total; try again later"));
    }
    unfinished_ += sequences.size();
    incoming_.splice(incoming_.end(), sequences);
  }
  wake_up_->changed.notify_all();
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
  while (WaitForWork()) {
    if (clock_) clock_->Begin();
    phase_.reset();
    Interrupt();
    DropEnded();
    try {
      StartSequences();
      RunStep();
    } catch (...) {
      slices_.clear();
      FailYoungest(std::current_exception());
    }
    DropEnded();
    if (clock_ && phase_) clock_->AddRest(*phase_);
  }
}

void Scheduler::FailYoungest(const std::exception_ptr& error) {
  const auto running =
      std::find_if(sequences_.rbegin(), sequences_.rend(), Undecided);
  Sequence* youngest = running != sequences_.rend() ? &*running : nullptr;
  if (!waiting_.empty() &&
      (youngest == nullptr || youngest->number() < waiting_.back().number())) {
    youngest = &waiting_.back();
    ended_anywhere_ = true;
  }
  if (youngest != nullptr) youngest->Fail(error);
}

// False when all is over.
bool Scheduler::WaitForWork() {
  std::list<Sequence> arrivals;
  bool stopping;
  {
    std::unique_lock lock(wake_up_->mutex);
    const auto ready = [&] { return HasWork(); };
    if (!ready()) {
      if (const auto deadline = NextDeadline()) {
        wake_up_->changed.wait_until(lock, *deadline, ready);
      } else {
        wake_up_->changed.wait(lock, ready);
      }
    }
    arrivals.splice(arrivals.end(), incoming_);
    interrupted_ |= std::exchange(wake_up_->interrupted, false);
    stopping = stopping_;
  }
  TakeOver(arrivals);
  if (!stopping) return true;
  for (const auto* sequences : {&waiting_, &sequences_, &settled_}) {
    for (const Sequence& sequence : *sequences) {
      sequence.stream().Stop(TokenStream::Interrupt::kCancel);
    }
  }
  interrupted_ = true;
  return !waiting_.empty() || !sequences_.empty() || !settled_.empty();
}

void Scheduler::TakeOver(std::list<Sequence>& arrivals) {
  for (Sequence& sequence : arrivals) {
    sequence.set_number(++arrivals_);
    if (const auto& deadline = sequence.deadline()) {
      next_deadline_ = std::min(next_deadline_.value_or(*deadline), *deadline);
    }
    // It may have been told before this scheduler was who is told.
    if (sequence.stream().interrupt() != TokenStream::Interrupt::kNone) {
      interrupted_ = true;
    }
  }
  waiting_.splice(waiting_.end(), arrivals);
}

// Requires: the wake-up's mutex is held. Of those that gave way, the oldest of
// a pool runs if nothing older of it does: where one competes, one can go on.
bool Scheduler::HasWork() const {
  if (stopping_ || !incoming_.empty() || wake_up_->interrupted) return true;
  for (const Sequence& sequence : sequences_) {
    Look(1);
    if (Active(sequence) || sequence.may_end()) return true;
  }
  // There are places.
  for (const Sequence& sequence : waiting_) {
    Look(1);
    if (!sequence.follows() && !sequence.fetches()) return true;
  }
  return false;
}

// When it is to go on though nobody wakes it.
std::optional<Sequence::Clock::time_point> Scheduler::NextDeadline() const {
  std::optional<Sequence::Clock::time_point> next = next_deadline_;
  for (const Sequence& sequence : waiting_) {
    if (!sequence.fetches()) continue;
    const auto deadline = sequence.fetch_deadline();
    next = std::min(next.value_or(deadline), deadline);
  }
  return next;
}

// Starts those that wait, in their order, as long as there are places; those
// that gave way, the oldest of each pool, or one after the other: the next when
// the one before has got back to where it was.
void Scheduler::StartSequences() {
  size_t active = 0;
  bool gave_way = false, catching_up = false;
  for (const Sequence& sequence : sequences_) {
    if (!Active(sequence)) continue;
    ++active;
    gave_way = gave_way || sequence.state() == State::kPreempted;
    catching_up = catching_up || sequence.catching_up();
  }
  Look(sequences_.size());
  pools_.clear();  // of those that compete, and are older than `at`
  auto waiting = waiting_.begin();
  for (auto at = sequences_.begin();;) {
    const bool any_waits =
        waiting != waiting_.end() && active < options_.max_running;
    if (!any_waits && (at == sequences_.end() || !gave_way)) break;
    Look(1);
    if (any_waits &&
        (at == sequences_.end() || waiting->number() < at->number())) {
      const auto next = waiting++;
      if (next->follows() || next->fetches() || FollowsAnother(*next) ||
          next->Fetch(wake_up_)) {
        continue;
      }
      // Behind those that run; who comes back is where it was.
      next->set_served(served_);
      sequences_.splice(at, waiting_, next);
      next->Start();
      ++active;
      if (gave_way) pools_.push_back(&next->cache().pool());
      continue;
    }
    Sequence& sequence = *at++;
    if (!gave_way || !Active(sequence)) continue;
    const BlockPool* const pool = &sequence.cache().pool();
    const bool is_oldest =
        std::find(pools_.begin(), pools_.end(), pool) == pools_.end();
    if (is_oldest) pools_.push_back(pool);
    if (sequence.state() == State::kPreempted &&
        (is_oldest || (ended_since_preempting_ && !catching_up))) {
      sequence.Start();
      catching_up = true;
    }
  }
}

// To where it belongs by its age.
void Scheduler::Move(std::list<Sequence>& from,
                     std::list<Sequence>::iterator what,
                     std::list<Sequence>& to) {
  auto before = to.end();
  while (before != to.begin() && what->number() < std::prev(before)->number()) {
    --before;
  }
  to.splice(before, from, what);
}

// Whether an earlier one reads now what it begins with.
bool Scheduler::FollowsAnother(Sequence& sequence) {
  if (!sequence.reads_prefix()) return false;
  for (Sequence& other : sequences_) {
    if (other.number() > sequence.number()) break;
    Look(1);
    if (sequence.Follow(other)) return true;
  }
  return false;
}

// Ends what was stopped, or has run out of time.
void Scheduler::Interrupt() {
  const bool over = next_deadline_ && Sequence::Clock::now() >= *next_deadline_;
  if (!std::exchange(interrupted_, false) && !over) return;
  next_deadline_.reset();
  ended_anywhere_ = true;
  for (auto* sequences : {&waiting_, &sequences_, &settled_}) {
    InterruptAll(*sequences);
  }
}

void Scheduler::InterruptAll(std::list<Sequence>& sequences) {
  const Sequence::Clock::time_point now = Sequence::Clock::now();
  Look(sequences.size());
  for (Sequence& sequence : sequences) {
    const TokenStream::Interrupt how = sequence.stream().interrupt();
    const auto& deadline = sequence.deadline();
    if (how == TokenStream::Interrupt::kAbort) {
      sequence.Fail(nullptr);
    } else if (how == TokenStream::Interrupt::kCancel) {
      sequence.Settle(FinishReason::kCancelled);
    } else if (deadline && now >= *deadline) {
      sequence.EndAtDeadline();
    } else if (deadline && (Undecided(sequence) || !sequence.batch())) {
      next_deadline_ = std::min(next_deadline_.value_or(*deadline), *deadline);
    }
  }
}

void Scheduler::DropEnded() {
  bool decided = std::exchange(ended_anywhere_, false);
  // Some of those that wait may end, too. There may be many: they are looked at
  // for these alone.
  bool waiting_end = decided;
  Look(sequences_.size());
  for (auto at = sequences_.begin(); at != sequences_.end();) {
    const auto sequence = at++;
    sequence->EndSettled();
    if (sequence->state() == State::kSettled && sequence->batch()) {
      Move(sequences_, sequence, settled_);
    } else if (sequence->state() == State::kEnded) {
      if (const Batch* const batch = sequence->batch()) {
        decided = decided || batch->decided();
        waiting_end = waiting_end || (batch->failed && batch->unstarted > 0);
      }
      ended_.splice(ended_.end(), sequences_, sequence);
    }
  }
  if (waiting_end) EndSettled(waiting_);
  if (decided) EndSettled(settled_);
  if (ended_.empty()) return;
  const size_t ended = ended_.size();
  ended_.clear();
  ended_since_preempting_ = true;
  speculation_->DropOrphans();
  const std::lock_guard lock(wake_up_->mutex);
  unfinished_ -= ended;
}

// Ends those that wait or are settled, after some have come to their end.
void Scheduler::EndSettled(std::list<Sequence>& sequences) {
  Look(sequences.size());
  for (auto at = sequences.begin(); at != sequences.end();) {
    const auto sequence = at++;
    sequence->EndSettled();
    if (sequence->state() == State::kEnded) {
      ended_.splice(ended_.end(), sequences, sequence);
    } else if (sequence->state() == State::kSettled &&
               &sequences == &waiting_) {
      Move(sequences, sequence, sequence->batch() ? settled_ : sequences_);
    }
  }
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
      slice.sequence->NoteSpeed(seconds / static_cast<double>(rows));
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
  round_.clear();
  for (Sequence& sequence : sequences_) {
    if (!sequence.runnable()) continue;
    round_.push_back(&sequence.ToGuess(MaxGuesses(options_)));
  }
  speculation_->Guess(round_);
  if (clock_) clock_->Hold(false);
  pool_->Enter(StepPart::kPlanning);
  Look(sequences_.size());
  std::vector<Sequence*> sequences;
  std::vector<PlanInput> inputs;
  sequences.reserve(sequences_.size());
  inputs.reserve(sequences_.size());
  for (Sequence& sequence : sequences_) {
    if (!sequence.runnable()) continue;
    if (sequence.guess_error()) {
      sequence.Fail(sequence.guess_error());
      continue;
    }
    inputs.push_back(sequence.ToPlan());
    sequences.push_back(&sequence);
  }
  std::vector<PlannedSlice> plan = PlanStep(inputs, options_);
  slices_.reserve(plan.size());
  for (PlannedSlice& slice : plan) {
    Sequence& sequence = *sequences[slice.sequence];
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
    sequence.set_served(++served_);
    return true;
  } catch (const CacheFull&) {
    // No conversation gives way to guesses, nor fails for them.
    if (sequence.DropGuesses(plan)) return false;
    if (MakeRoom(sequence)) return false;
    for (const Sequence& other : sequences_) {
      if (&other == &sequence) break;
      if (Active(other) && SamePool(other, sequence)) {
        Preempt(sequence);
        return true;
      }
    }
    if (sequence.LeavePrefix()) {
      Preempt(sequence);
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

// Has the prefix cache give up what is shared with those that run, so that none
// of it must be copied. Then has another one give its blocks back: one that
// waits for its reader, else one that is younger; of these, the youngest. A
// batch that does not fit takes nothing from its own that are done.
bool Scheduler::MakeRoom(Sequence& sequence) {
  if (sequence.GiveUpIndexed()) return true;
  Sequence* victim = YoungestSettled(sequence);
  bool younger = true;
  for (auto other = sequences_.rbegin(); other != sequences_.rend(); ++other) {
    if (&*other == &sequence) {
      younger = false;
      continue;
    }
    if (other->state() == State::kEnded || !other->holds_computed() ||
        !SamePool(*other, sequence)) {
      continue;
    }
    const bool settled_apart =
        other->state() == State::kSettled && other->batch() != sequence.batch();
    if (other->stream().waits_for_reader()) {
      victim = &*other;
      break;
    }
    if (younger && (Active(*other) || settled_apart) &&
        (victim == nullptr || victim->number() < other->number())) {
      victim = &*other;
    }
  }
  if (victim == nullptr) return false;
  Preempt(*victim);
  return true;
}

// Finds the youngest one that is done and younger than the sequence, of another
// batch, with blocks of the same pool; null if there is none.
Sequence* Scheduler::YoungestSettled(const Sequence& sequence) {
  for (auto other = settled_.rbegin(); other != settled_.rend(); ++other) {
    if (other->number() < sequence.number()) break;
    if (other->batch() != sequence.batch() && other->holds_computed() &&
        SamePool(*other, sequence)) {
      return &*other;
    }
  }
  return nullptr;
}

void Scheduler::Preempt(Sequence& sequence) {
  sequence.Preempt();
  ended_since_preempting_ = false;
  ++preemptions_;
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
