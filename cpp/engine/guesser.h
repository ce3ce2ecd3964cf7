#ifndef GEMMAKV_ENGINE_GUESSER_H_
#define GEMMAKV_ENGINE_GUESSER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/constraint.h"
#include "engine/guess_plan.h"
#include "engine/learned.h"
#include "engine/row_consumer.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

struct DraftConversation;
class Drafter;

// Who guesses for a request.
struct GuessSources {
  std::shared_ptr<Drafter> drafter = nullptr;      // null: none
  std::shared_ptr<const Model> model = nullptr;    // null: none
  bool forced = false;  // what its constraint forces is guessed
  Address tenant = {};  // whose other requests may be guessed from
};

// A request as those see it that guess what it says next. It belongs to the
// request, which says how things stand before each step (Request::ToGuess).
// Then Guessers propose guesses, a plan says how many of them the step takes
// (`planned`), and those of models are made. Guesses stay until the request has
// had a step, and are forgotten then.
struct Candidate {
  GuessSources sources;

  // ---- What the request says ----

  const KVCache* cache = nullptr;
  const RunLock* lock = nullptr;  // of the cache
  RowConsumer* consumer = nullptr;
  Constraint* constraint = nullptr;  // null: none
  size_t sampled_from = 0;  // tokens from here on are the consumer's
  bool decodes = false;     // else it reads its prompt,
  size_t read = 0;          // up to here
  bool is_new = false;  // it decodes, and nobody was asked what follows now
  size_t most = 0;      // guesses that there is room for

  // ---- What guessers say ----

  std::vector<DraftGuess> proposed;  // guesses that there are
  GuessOffer offer;                  // of those that there might be
  size_t planned = 0;                // so many are to be in the step
  std::exception_ptr error;          // what the drafter, or the model, threw

  // ---- What guessers keep ----

  size_t told = 0;  // the drafter has seen the transcript up to here

  std::vector<int32_t> forced;  // of the constraint
  std::exception_ptr forced_error;

  // What a model's guesses have shown, and have cost.
  struct Record {
    LearnedMean right;             // share of guesses that were right, of late
    std::vector<int32_t> guesses;  // of tokens from `guessed_at` on
    size_t guessed_at = 0;
    size_t judged = 0;     // guesses of tokens before were judged
    double decoded_s = 0;  // time of the request's steps
    double tried_s = 0;    // that it took to see whether guesses would be right
  };
  Record record;
  std::shared_ptr<DraftConversation> drafted;  // what a DraftModel knows of it
  // What the model's head read to sample the last token of the transcript when
  // that had this length; empty: not known.
  std::vector<float> hidden;
  size_t hidden_length = 0;

  // The guesses that are rows of the next step.
  std::span<const DraftGuess> guesses() const {
    return std::span(proposed).first(std::min(planned, proposed.size()));
  }
  // They have had their step, or will have none.
  void Forget() {
    proposed.clear();
    planned = 0;
  }
  // Whether the model reads hidden states of this one.
  bool reads_states() const {
    return sources.model && sources.model->config.target_hidden != 0;
  }
};

// Guesses what requests say next, for all of them at once. Calls come from the
// scheduler's thread, between two steps, the three for one step one after the
// other. `round` has the requests that may be in the step; a call looks for its
// own among them: of those that decode, those that are new.
//
// No call throws. Lack of memory means fewer guesses; what else fails a request
// is its `error`.
class Guesser {
 public:
  virtual ~Guesser() = default;

  // Begins what other threads do.
  virtual void Ask(std::span<Candidate* const> round,
                   const GuessCosts& costs) noexcept {
    (void)round, (void)costs;
  }
  // Proposes guesses, or says in `offer` what it could make.
  virtual void Propose(std::span<Candidate* const> round,
                       const GuessCosts& costs) noexcept = 0;
  // Makes as many as are `planned` of what it offered.
  virtual void Make(const GuessCosts& costs) noexcept { (void)costs; }
  // The model that it runs; null: none. Where nobody else holds it, no request
  // will ever name it again.
  virtual const std::shared_ptr<const Model>& model() const noexcept {
    static const std::shared_ptr<const Model> none;
    return none;
  }
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_GUESSER_H_
