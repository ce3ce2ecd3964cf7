#ifndef GEMMAKV_ENGINE_SPECULATION_H_
#define GEMMAKV_ENGINE_SPECULATION_H_

#include <cstddef>
#include <list>
#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "engine/guesser.h"
#include "engine/lookup_history.h"
#include "engine/model_drafter.h"
#include "engine/side_work.h"
#include "engine/step_times.h"
#include "gemmakv/options.h"
#include "model/forward.h"
#include "store/address.h"

namespace gkv {

// Guesses the next tokens of all requests of a model (speculative decoding). A
// guess is computed in the same step as the token before it, and is accepted if
// it is the token that the model samples there. Guesses change how many steps a
// reply takes, and no bit of it.
//
// The StepRunner calls Guess before a step, with all requests that may be in
// it, and Note after the step. Guess asks the list of Guessers: first the
// requests' own drafters (DrafterGuesser), then their constraints
// (ForcedGuesser), then models, one guesser for each model that a request
// names, made when it is first named. They propose guesses and say how likely
// these are right, or offer to make some and say what that costs. One plan
// (guess_plan.h) then chooses, over all requests, the guesses that bring the
// most tokens in the time, and none if they do not pay. The models then make
// theirs. Note learns how long steps take with and without guesses
// (step_times.h). DropOrphans drops guessers of models that no request can name
// any more.
//
// Belongs to the scheduler's thread, except for the functions that are said to
// be thread-safe. There are at most as many guesses as leave room for all
// decoding requests in the step. A lack of memory means fewer guesses and fails
// nobody.
class Speculation {
 public:
  // `target`, `pool` and `side_work` (of ForcedGuesser) are not owned.
  Speculation(const Model& target, ThreadPool& pool,
              const SchedulerOptions& options, SideWork& side_work);

  // Says in each candidate which guesses the next step is to take: no more than
  // let all requests decode in one step.
  void Guess(std::span<Candidate* const> round);

  // What a step did.
  struct Step {
    size_t requests = 0;
    size_t guesses = 0;
    double seconds = 0;  // including Guess
    bool only_decodes = true;
  };
  void Note(const Step& step);

  // Drops models that no request can name any more.
  void DropOrphans();

  // Returns the texts from which requests of a tenant are guessed. Thread-safe;
  // the history itself belongs to the scheduler's thread. Throws
  // std::bad_alloc.
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return histories_.Of(tenant);
  }
  // The number of rows that draft models computed. Thread-safe.
  size_t draft_rows() const { return work_.rows.load(); }

 private:
  GuessCosts CostsOf(std::span<Candidate* const> round,
                     std::span<double> extra) const;
  void MakeModels(std::span<Candidate* const> round);
  static void Plan(std::span<Candidate* const> round, const GuessCosts& costs);

  const Model& target_;
  ThreadPool& pool_;
  const SchedulerOptions options_;
  LookupHistories histories_;
  StepTimes times_;
  DraftWork work_;
  // In the order in which they propose. Models come last.
  std::list<std::unique_ptr<Guesser>> guessers_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SPECULATION_H_
