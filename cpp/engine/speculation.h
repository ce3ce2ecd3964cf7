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

// Guesses what the requests of a model say next. A guess is computed in the
// same step as the token before it and counts as far as it turns out right: it
// changes how many steps a reply takes, and no bit of it.
//
// The scheduler calls Guess before a step, with all requests that may be in it,
// and Note after the step. Guess asks the Guessers, which are a request's own
// drafter (lookup), its constraint, and models: one for each that requests
// name, made when it is first named. They propose guesses and say how likely
// they are right, or say what it would cost to make some. One plan
// (guess_plan.h) then chooses over all requests as many as bring the most
// tokens in the time, none where they do not pay, and models make theirs. Note
// learns what steps cost with so many guesses and without (step_times.h).
//
// Belongs to the scheduler's thread, but for what is said to be thread-safe.
// Lack of memory means fewer guesses and fails nobody.
class Speculation {
 public:
  // `target`, `pool` and `side_work` (of ForcedGuesser) are not owned.
  Speculation(const Model& target, ThreadPool& pool,
              const SchedulerOptions& options, SideWork& side_work);

  // Says in each candidate which guesses the next step is to take, no more than
  // let all decode in the same step.
  void Guess(std::span<Candidate* const> round);

  // A step was run.
  struct Step {
    size_t requests = 0;
    size_t guesses = 0;
    double seconds = 0;  // with what Guess took
    bool only_decodes = true;
  };
  void Note(const Step& step);

  // Lets go of models that no request can name any more.
  void DropOrphans();

  // What requests of one tenant may be guessed from. Thread-safe; what it gives
  // is the scheduler's thread's. Throws std::bad_alloc.
  std::shared_ptr<LookupHistory> HistoryOf(const Address& tenant) {
    return histories_.Of(tenant);
  }
  // Rows that draft models computed. Thread-safe.
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
