#ifndef GEMMAKV_ENGINE_SEQUENCE_H_
#define GEMMAKV_ENGINE_SEQUENCE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "engine/constraint.h"
#include "engine/guesser.h"
#include "engine/prefix_use.h"
#include "engine/row_consumer.h"
#include "engine/step_plan.h"
#include "engine/token_stream.h"

namespace gkv {

class Sequence;

// A sequence's part of one step: rows of positions [view.begin, view.end).
struct StepSlice {
  Sequence* sequence = nullptr;
  std::vector<int32_t> ids;
  size_t guesses = 0;  // the last of the ids
  KvStepView view;
  std::vector<size_t> points;  // for the prefix cache, ascending
  RowOutput output;            // of the last output.rows rows
  size_t row_size = 0;
  bool wants_states = false;   // for a drafter

  // Of each output row of a sequence with a constraint; see ComputeMasks.
  std::vector<uint32_t> masks;
  std::vector<bool> may_end;
  std::exception_ptr mask_error;
};

// Requests that succeed together or not at all: none lets go of its cache
// before all have come to their end.
struct Batch {
  size_t undecided = 0;
  size_t unstarted = 0;  // members that have had no turn
  bool failed = false;
  std::exception_ptr error;  // of the first that failed; null if aborted

  // Whether all of them end now.
  bool decided() const { return failed || undecided == 0; }
};

// One request as the scheduler sees it.
//
//   kWaiting --> kPrefilling <--> kDecoding --> kSettled --> kEnded
//                     ^ |            |
//                     | v            |
//                  kPreempted <------+
//
// Any state may end, by a failure, a cancel or a deadline. Belongs to the
// scheduler's thread; TakeRows alone may run on another one.
class Sequence {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    kWaiting,     // for its turn
    kPrefilling,  // computes what it knows
    kDecoding,    // computes the token that it sampled last, and guesses
    kPreempted,   // gave its blocks back, waits for others to end
    kSettled,     // done, waits for the others of its batch, or its reader
    kEnded,
  };
  struct Parts {
    std::shared_ptr<TokenStream> stream;
    std::unique_ptr<RowConsumer> consumer = nullptr;  // null: prompt only
    size_t output_rows = 1;              // of the prompt's last rows
    std::vector<int32_t> stop_ids = {};  // allowed where a constraint ends
    std::unique_ptr<Constraint> constraint = nullptr;
    GuessSources guessed_by = {};
    std::optional<Clock::time_point> deadline = std::nullopt;
    std::shared_ptr<Batch> batch = nullptr;  // null: alone
    PrefixAccess prefix = {};
  };

  // Requires: the stream's transaction is open.
  explicit Sequence(Parts parts);
  Sequence(const Sequence&) = delete;

  State state() const { return state_; }
  TokenStream& stream() const { return *parts_.stream; }
  KVCache& cache() const { return stream().transaction().cache(); }
  const std::optional<Clock::time_point>& deadline() const {
    return parts_.deadline;
  }
  bool has_constraint() const { return parts_.constraint != nullptr; }
  // In a step as soon as the planner takes it.
  bool runnable() const {
    return (state_ == State::kPrefilling || state_ == State::kDecoding) &&
           !stream().waits_for_reader();
  }
  bool holds_computed() const { return computed_; }
  // Its place among all that came, from 1 on.
  uint64_t number() const { return number_; }
  void set_number(uint64_t number) { number_ = number; }
  const Batch* batch() const { return parts_.batch.get(); }
  PrefixUse& prefix() { return prefix_; }
  const PrefixUse& prefix() const { return prefix_; }
  // It has not yet got back to where it was preempted.
  bool catching_up() const {
    return state_ == State::kPrefilling && preempted_;
  }

  // kWaiting or kPreempted -> kPrefilling, behind what the prefix cache has.
  void Start();
  // kPrefilling or kDecoding -> kPreempted: gives back what it computed, and
  // will compute it again. One that is kSettled stays so, and whoever uses the
  // conversation next computes it. Throws std::bad_alloc, changing nothing.
  void Preempt();

  // Says to those that guess how things stand, with room for `max_guesses` at
  // most. Once a step: nobody is asked twice what follows the same token.
  Candidate& ToGuess(size_t max_guesses);
  // What was thrown where they guessed; null: nothing.
  const std::exception_ptr& guess_error() const { return candidate_.error; }
  // Goes without half of its guesses, at last without any; false if the plan has
  // none.
  bool DropGuesses(PlannedSlice& plan);
  // What there is to plan.
  PlanInput ToPlan() const;
  void set_served(uint64_t place) { served_ = place; }
  // Requires: `plan` is of the last ToPlan. Throws CacheFull and
  // std::bad_alloc, changing nothing.
  StepSlice Prepare(const PlannedSlice& plan, size_t vocab_size,
                    size_t hidden_size);
  // Fills the slice's masks; any thread. What it throws is in mask_error.
  void ComputeMasks(StepSlice& slice) noexcept;
  // Does without the prefix cache from now on; false if it did already, or has
  // computed nothing. What it took, or had to copy because the index had it,
  // may be a block more than what it needs alone.
  bool LeavePrefix();
  // The step has run: takes its rows, and commits as far as guesses were right.
  // `pool` as in parallel_logits.h. Conclude() is due then.
  void TakeRows(StepSlice& slice, ThreadPool* pool) noexcept;
  // Settles or fails if TakeRows came to that.
  void Conclude() noexcept;

  // Comes to its end: at once, if it is alone and its reader not behind.
  void Settle(FinishReason reason) noexcept;
  // Ends, and has the others of its batch end, with an error; null: as if the
  // request had never been made.
  void Fail(std::exception_ptr error) noexcept;
  // Whether EndSettled() ends it.
  bool may_end() const;
  // Ends if it is done, and its batch, or its reader too.
  void EndSettled() noexcept;
  // Its time is over.
  void EndAtDeadline() noexcept;

 private:
  void TakeState(const StepSlice& slice, size_t taken);
  bool TakeRow(const StepSlice& slice, size_t row, ThreadPool* pool);
  size_t GuessLimit(size_t max_guesses) const;
  size_t LookUpLimit() const;
  void GiveBackAtEnd() noexcept;

  Parts parts_;
  State state_ = State::kWaiting;
  uint64_t number_ = 0;
  size_t next_ = 0;
  size_t target_ = 0;
  size_t logits_begin_ = 0;
  uint64_t served_ = 0;
  bool sampled_ = false;         // its transcript ends with a token of its own
  bool computed_ = false;        // since it was started
  bool preempted_ = false;       // and has not caught up yet
  PrefixUse prefix_;
  Candidate candidate_;
  size_t asked_at_ = 0;  // those that guess were asked what follows here
  FinishReason reason_ = FinishReason::kNone;  // why it is done
  std::exception_ptr error_;                   // of TakeRows
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SEQUENCE_H_
