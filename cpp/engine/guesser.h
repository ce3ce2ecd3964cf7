#ifndef GEMMAKV_ENGINE_GUESSER_H_
#define GEMMAKV_ENGINE_GUESSER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "cache/conversation.h"
#include "engine/constraint.h"
#include "engine/guess_plan.h"
#include "engine/learned.h"
#include "engine/row_consumer.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

struct DraftConversation;
class Drafter;

// The guessers of a request.
struct GuessSources {
  std::shared_ptr<Drafter> drafter = nullptr;      // null: none
  std::shared_ptr<const Model> model = nullptr;    // null: none
  bool forced = false;  // tokens that its constraint forces are guessed
  Address tenant = {};  // whose other requests may be guessed from
};

// A request as guessers see it. It belongs to the request, which sets it before
// each step (Request::ToGuess). Then Guessers propose guesses, a plan says how
// many of them the step takes (`planned`), and models make theirs. Guesses stay
// until the request has had a step, and are dropped then.
struct Candidate {
  GuessSources sources;

  // ---- What the request says ----

  const Conversation* cache = nullptr;
  const RunLock* lock = nullptr;  // of the cache
  RowConsumer* consumer = nullptr;
  Constraint* constraint = nullptr;  // null: none
  size_t sampled_from = 0;  // tokens from here on are the consumer's
  bool decodes = false;     // else it reads its prompt, of which
  size_t read = 0;          // so many tokens are computed
  bool is_new = false;  // it decodes, and guessers were not asked yet
  size_t most = 0;      // the most guesses that there is room for

  // ---- What guessers say ----

  std::vector<DraftGuess> proposed;  // the known guesses
  GuessOffer offer;                  // guesses that a model might make
  size_t planned = 0;                // the number of guesses in the step
  std::exception_ptr error;          // thrown by the drafter or the model

  // ---- What guessers keep ----

  size_t told = 0;  // the drafter has seen the transcript up to here

  std::vector<int32_t> forced;  // of the constraint
  std::exception_ptr forced_error;

  // What was learned of a model's guesses.
  struct Record {
    LearnedMean right;             // share of right guesses, lately
    std::vector<int32_t> guesses;  // of tokens from `guessed_at` on
    size_t guessed_at = 0;
    size_t judged = 0;     // guesses of tokens before this one were judged
    double decoded_s = 0;  // time of the request's steps
    double tried_s = 0;    // time of trials whether guesses would be right
  };
  Record record;
  std::shared_ptr<DraftConversation> drafted;  // of a DraftModel
  // The hidden state from which the last token of the transcript was sampled
  // when the transcript had this length; empty: not known.
  std::vector<float> hidden;
  size_t hidden_length = 0;

  // Returns the guesses that are rows of the next step.
  std::span<const DraftGuess> guesses() const {
    return std::span(proposed).first(std::min(planned, proposed.size()));
  }
  // Drops the guesses: they had their step, or will have none.
  void Forget() {
    proposed.clear();
    planned = 0;
  }
  // Whether the drafter reads hidden states of this model.
  bool reads_states() const {
    return sources.model && sources.model->config.target_hidden != 0;
  }
};

// Guesses the next tokens of all requests at once. Calls come from the
// scheduler's thread, between two steps: Ask, Propose and Make for each step,
// in this order. `round` has the requests that may be in the step; a call looks
// for its own among the requests that decode and are new.
//
// No call throws. A lack of memory means fewer guesses; any other failure is
// set as the request's `error`.
class Guesser {
 public:
  virtual ~Guesser() = default;

  // Begins the work of other threads.
  virtual void Ask(std::span<Candidate* const> round,
                   const GuessCosts& costs) noexcept {
    (void)round, (void)costs;
  }
  // Proposes guesses, or says in `offer` which it could make.
  virtual void Propose(std::span<Candidate* const> round,
                       const GuessCosts& costs) noexcept = 0;
  // Makes the `planned` number of the offered guesses.
  virtual void Make(const GuessCosts& costs) noexcept { (void)costs; }
  // The model that it runs; null: none. If nobody else holds the model, no
  // request will ever name it again.
  virtual const std::shared_ptr<const Model>& model() const noexcept {
    static const std::shared_ptr<const Model> none;
    return none;
  }
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GUESSER_H_
