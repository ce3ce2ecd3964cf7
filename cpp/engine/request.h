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

// The rows of one request in one step: positions [view.begin, view.end).
struct StepSlice {
  Request* request = nullptr;
  std::vector<int32_t> ids;
  size_t guesses = 0;  // the last so many ids
  KvStepView view;
  std::vector<size_t> points;  // for the prefix cache, ascending
  RowOutput output;            // for the last output.rows rows
  size_t row_size = 0;
  bool wants_states = false;  // for a drafter
  TokenMasks masks;

  // Set by TakeRows.
  FinishReason reason = FinishReason::kNone;  // why the request is done
  std::exception_ptr error;                   // why it failed
};

// Requests that succeed together or not at all: none releases its cache before
// all of them are done.
struct Batch {
  size_t undecided = 0;
  size_t unstarted = 0;  // members that have not started
  bool failed = false;
  std::exception_ptr error;  // of the first that failed; null if aborted

  // Whether all members end now.
  bool decided() const { return failed || undecided == 0; }
};

// One call's work on one conversation: to compute a prompt, and perhaps to
// sample tokens after it, or to give rows of logits or of hidden states.
//
// A request is in one of six states. What only one state needs is a member of
// that state:
//
//   Waiting      It has not started.
//   Prefilling   It computes known tokens: its prompt, or, after a preemption,
//                everything that it gave back.
//   Decoding     It computes the token that it sampled last, and guesses.
//   Preempted    It gave its blocks back, and waits for others to end.
//   Settled      It is done, and waits for the rest of its batch or for its
//                reader.
//   Ended        Its stream has the result, and the conversation is free.
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
// The transcript has the positions [0, target_); those from next_ on have yet
// to be computed. The rows from logits_begin_ on go to the consumer, each once,
// even if its position is computed again. A step calls ToGuess, ToPlan,
// Prepare, TakeRows and Conclude, in this order. The request holds its
// conversation through the stream's transaction until it has ended. Ending it
// allocates nothing.
//
// A request belongs to the scheduler's thread. ComputeMasks and TakeRows may
// run on other threads, for different requests at the same time.
class Request {
 public:
  using Clock = std::chrono::steady_clock;

  struct Waiting {};
  struct Prefilling {
    // it has yet to reach the position where it was preempted
    bool again = false;
  };
  struct Decoding {
    bool asked = false;  // guessers were asked what follows
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
  // Whether a step may give it rows.
  bool runnable() const {
    return (is<Prefilling>() || is<Decoding>()) && !stream().waits_for_reader();
  }
  // Whether it computes again what it gave back.
  bool catching_up() const {
    const Prefilling* const state = std::get_if<Prefilling>(&state_);
    return state != nullptr && state->again;
  }
  // Whether Preempt would free blocks.
  bool holds_blocks() const { return holds_blocks_; }
  TokenStream& stream() const { return *parts_.stream; }
  // Requires: not Ended.
  Conversation& cache() const { return stream().transaction().cache(); }
  PrefixUse& prefix() { return prefix_; }
  const PrefixUse& prefix() const { return prefix_; }
  const std::optional<Clock::time_point>& deadline() const {
    return parts_.deadline;
  }
  const Batch* batch() const { return parts_.batch.get(); }
  // The number of the request by arrival, from 1 on, and its place by service.
  uint64_t number() const { return number_; }
  void set_number(uint64_t number) { number_ = number; }
  void set_served(uint64_t place) { served_ = place; }

  // ---- Turns ----

  // Starts computing, after what the prefix cache has. Requires: Waiting or
  // Preempted.
  void Start();
  // Gives back the blocks that the request filled; it will compute them again.
  // A Settled request stays Settled, and the next user of the conversation
  // computes them. Ends its PrefixUse, so it leads nobody. Throws
  // std::bad_alloc: the request keeps its blocks then.
  void Preempt();

  // ---- A step ----

  // Tells guessers the state of the request, with room for at most
  // `max_guesses` guesses. They are asked once for each sampled token.
  Candidate& ToGuess(size_t max_guesses);
  // Returns what the planner needs to know.
  PlanInput ToPlan() const;
  // Drops half of the guesses of `plan`, and all of them at last. Returns false
  // if the plan has none.
  bool DropGuesses(PlannedSlice& plan);
  // Requires: `plan` is of the last ToPlan. Throws CacheFull and
  // std::bad_alloc, changing nothing.
  StepSlice Prepare(const PlannedSlice& plan, size_t vocab_size,
                    size_t hidden_size);
  // Requires: the slice has masks.
  void ComputeMasks(StepSlice& slice) noexcept;
  // Takes the rows of the step and commits them up to the first wrong guess.
  // `pool` as in parallel_logits.h.
  void TakeRows(StepSlice& slice, ThreadPool* pool) noexcept;
  // Settles or fails the request if TakeRows said so in the slice.
  void Conclude(StepSlice& slice) noexcept;

  // ---- The end ----

  // Says that the request is done. It ends at once if it is in no batch and
  // does not wait for its reader.
  void Settle(FinishReason reason) noexcept;
  // Ends the request and its batch with an error; null: as if the request had
  // never been made.
  void Fail(std::exception_ptr error) noexcept;
  // Whether EndSettled ends the request: it is done, or its batch has failed,
  // and there is nobody to wait for.
  bool may_end() const;
  void EndSettled() noexcept;
  // Settles the request and does not wait for its reader.
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
  bool holds_blocks_ = false;  // it filled some since it started
  PrefixUse prefix_;
  Candidate candidate_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_REQUEST_H_
