#ifndef GEMMAKV_ENGINE_REQUEST_H_
#define GEMMAKV_ENGINE_REQUEST_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "base/thread_pool.h"
#include "engine/constraint.h"
#include "engine/guesser.h"
#include "engine/prefix_use.h"
#include "engine/row_consumer.h"
#include "engine/step_plan.h"
#include "engine/token_masks.h"
#include "engine/token_stream.h"

namespace gkv {

class Request;

// A request's part of one step: rows of positions [view.begin, view.end).
struct StepSlice {
  Request* request = nullptr;
  std::vector<int32_t> ids;
  size_t guesses = 0;  // the last of the ids
  KvStepView view;
  std::vector<size_t> points;  // for the prefix cache, ascending
  RowOutput output;            // of the last output.rows rows
  size_t row_size = 0;
  bool wants_states = false;  // for a drafter
  TokenMasks masks;

  // What came of it, when its rows have been taken.
  FinishReason reason = FinishReason::kNone;  // why the request is done
  std::exception_ptr error;                   // why it failed
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

// What somebody asked a model to do with one conversation: to compute a prompt,
// and perhaps to sample tokens after it, or to give rows of logits or of hidden
// states.
//
// It is in one of six states, and what only one of them needs is a member of
// that state:
//
//   Waiting      for its turn.
//   Prefilling   It computes what is known: its prompt, or what it computes
//                again because it gave its blocks back.
//   Decoding     It computes the token that it sampled last, and guesses.
//   Preempted    It gave its blocks back, and waits for others to end.
//   Settled      It is done, and waits for the others of its batch, or for its
//                reader.
//   Ended        Its stream says how, and the conversation is free.
//
//    Waiting --Start--> Prefilling --TakeRows--> Decoding
//                        |      ^                 |    |
//                     Preempt  Start           Preempt |
//                        v      |                 v    |
//                        Preempted <--------------+    |
//                                                      v
//    any but Ended --Settle--> Settled --EndSettled--> Ended
//    any but Ended --Fail--------------------------->  Ended
//
// The transcript has the positions [0, target_), of which those from next_ on
// are to be computed; rows from logits_begin_ on go to the consumer, each once,
// however often its position is computed. A step is, in this order: ToGuess,
// ToPlan, Prepare, TakeRows, Conclude. The request holds its conversation
// through the stream's transaction until it has ended. What ends it allocates
// nothing.
//
// Belongs to the scheduler's thread. ComputeMasks and TakeRows may run on
// others, for different requests at the same time.
class Request {
 public:
  using Clock = std::chrono::steady_clock;

  struct Waiting {};
  struct Prefilling {
    bool again = false;  // it is not yet back where it gave way
  };
  struct Decoding {
    bool asked = false;  // those that guess were asked what follows
  };
  struct Preempted {};
  struct Settled {
    FinishReason reason;
  };
  struct Ended {};

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
  explicit Request(Parts parts);
  Request(const Request&) = delete;

  template <typename State>
  bool is() const {
    return std::holds_alternative<State>(state_);
  }
  // In a step as soon as the planner takes it.
  bool runnable() const {
    return (is<Prefilling>() || is<Decoding>()) && !stream().waits_for_reader();
  }
  // It computes again what it gave back.
  bool catching_up() const {
    const Prefilling* const state = std::get_if<Prefilling>(&state_);
    return state != nullptr && state->again;
  }
  // There is something that Preempt would give back.
  bool holds_blocks() const { return holds_blocks_; }
  TokenStream& stream() const { return *parts_.stream; }
  // Requires: not Ended.
  KVCache& cache() const { return stream().transaction().cache(); }
  PrefixUse& prefix() { return prefix_; }
  const PrefixUse& prefix() const { return prefix_; }
  const std::optional<Clock::time_point>& deadline() const {
    return parts_.deadline;
  }
  const Batch* batch() const { return parts_.batch.get(); }
  // Its place among all that came, from 1 on, and among those that were served.
  uint64_t number() const { return number_; }
  void set_number(uint64_t number) { number_ = number; }
  void set_served(uint64_t place) { served_ = place; }

  // ---- Turns ----

  // Goes on from what the prefix cache has. Requires: Waiting or Preempted.
  void Start();
  // Gives back what it computed, and will compute it again. One that is Settled
  // stays so, and whoever uses the conversation next computes it. Throws
  // std::bad_alloc: it has its blocks then, and leads nobody.
  void Preempt();

  // ---- A step ----

  // Says to those that guess how things stand, with room for `max_guesses` at
  // most. Nobody is asked twice what follows the same token.
  Candidate& ToGuess(size_t max_guesses);
  // What there is to plan.
  PlanInput ToPlan() const;
  // Goes without half of its guesses, at last without any; false if the plan
  // has none.
  bool DropGuesses(PlannedSlice& plan);
  // Requires: `plan` is of the last ToPlan. Throws CacheFull and
  // std::bad_alloc, changing nothing.
  StepSlice Prepare(const PlannedSlice& plan, size_t vocab_size,
                    size_t hidden_size);
  // Requires: the slice has masks.
  void ComputeMasks(StepSlice& slice) noexcept;
  // The step has run: takes its rows, and commits as far as guesses were right.
  // `pool` as in parallel_logits.h.
  void TakeRows(StepSlice& slice, ThreadPool* pool) noexcept;
  // Settles or fails if TakeRows came to that.
  void Conclude(StepSlice& slice) noexcept;

  // ---- The end ----

  // It is done. It ends at once if it is alone and its reader not behind.
  void Settle(FinishReason reason) noexcept;
  // Ends, and has the others of its batch end, with an error; null: as if the
  // request had never been made.
  void Fail(std::exception_ptr error) noexcept;
  // Whether EndSettled ends it: it is done, or its batch has failed, and nobody
  // is to be waited for.
  bool may_end() const;
  void EndSettled() noexcept;
  // Settles, and waits for no reader.
  void EndAtDeadline() noexcept;

 private:
  using State = std::variant<Waiting, Prefilling, Decoding, Preempted, Settled,
                             Ended>;

  void Become(State state) noexcept;
  size_t PrefixLimit() const;
  size_t GuessLimit(size_t max_guesses) const;
  bool TakeRow(StepSlice& slice, size_t row, ThreadPool* pool);
  void TakeState(const StepSlice& slice, size_t taken);
  void GiveBackAtEnd() noexcept;

  Parts parts_;
  State state_;
  uint64_t number_ = 0;
  uint64_t served_ = 0;
  size_t next_;
  size_t target_;
  size_t logits_begin_;
  bool holds_blocks_ = false;  // that were filled since it started
  PrefixUse prefix_;
  Candidate candidate_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_REQUEST_H_
