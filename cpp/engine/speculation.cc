#include "engine/speculation.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>
#include <vector>

#include "engine/draft_model.h"
#include "engine/drafter.h"
#include "engine/forced_guesser.h"
#include "engine/target_drafter.h"

namespace gkv {

Speculation::Speculation(const Model& target, ThreadPool& pool,
                         const SchedulerOptions& options, SideWork& side_work)
    : target_(target), pool_(pool), options_(options) {
  guessers_.push_back(std::make_unique<DrafterGuesser>());
  guessers_.push_back(std::make_unique<ForcedGuesser>(side_work));
}

void Speculation::Guess(std::span<Candidate* const> round) {
  work_.seconds = 0;
  for (Candidate* const c : round) {
    c->offer = {};
    c->planned = 0;
  }
  std::array<double, StepTimes::kMaxGuesses> extra;
  const GuessCosts costs = CostsOf(round, extra);
  MakeModels(round);
  for (const auto& guesser : guessers_) guesser->Ask(round, costs);
  for (const auto& guesser : guessers_) guesser->Propose(round, costs);
  Plan(round, costs);
  for (const auto& guesser : guessers_) guesser->Make(costs);
}

// Returns the costs, which refer to `extra`. While a prompt is read there are
// no guesses: a prompt makes better use of each row.
GuessCosts Speculation::CostsOf(std::span<Candidate* const> round,
                                std::span<double> extra) const {
  GuessCosts costs{.tokens = 0, .always = options_.always_guess};
  for (const Candidate* const c : round) {
    costs.tokens += c->decodes;
    costs.reads_prompts = costs.reads_prompts || !c->decodes;
  }
  const size_t rows = std::min(options_.step_rows, options_.logits_rows);
  extra = extra.first(
      std::min(rows - std::min(rows, costs.tokens), extra.size()));
  if (costs.always) {
    costs.step = 1;
    std::fill(extra.begin(), extra.end(), 0);
    costs.extra = extra;
  } else {
    costs.step = times_.Seconds(costs.tokens);
    if (!costs.reads_prompts) {
      costs.extra = extra.first(times_.FillExtra(costs.tokens, extra));
    }
  }
  // Other requests wait while a draft model reads.
  costs.read_rows =
      costs.tokens > 1 ? options_.step_rows / 4 : options_.step_rows;
  return costs;
}

// Makes the guessers of models that requests name. If there is no memory for
// one, the request does without.
void Speculation::MakeModels(std::span<Candidate* const> round) {
  for (const Candidate* const c : round) {
    const std::shared_ptr<const Model>& model = c->sources.model;
    if (!model || std::any_of(guessers_.begin(), guessers_.end(),
                              [&](const auto& guesser) {
                                return guesser->model() == model;
                              })) {
      continue;
    }
    try {
      if (model->config.target_hidden != 0) {
        guessers_.push_back(
            std::make_unique<TargetDrafter>(model, target_, pool_, work_));
      } else {
        guessers_.push_back(std::make_unique<DraftModel>(
            model, target_, pool_, options_.draft_cache_bytes, work_));
      }
    } catch (const std::bad_alloc&) {
      return;
    }
  }
}

void Speculation::Plan(std::span<Candidate* const> round,
                       const GuessCosts& costs) {
  try {
    std::vector<Candidate*> asked;
    std::vector<GuessOffer> offers;
    for (Candidate* const c : round) {
      if (!c->proposed.empty()) c->offer = {.known = c->proposed};
      if (c->offer.known.empty() && c->offer.most == 0) continue;
      asked.push_back(c);
      offers.push_back(c->offer);
    }
    if (asked.empty()) return;
    const GuessPlan plan = PlanGuesses(offers, costs);
    for (size_t i = 0; i < asked.size(); ++i) {
      asked[i]->planned = plan.guesses[i];
    }
  } catch (const std::bad_alloc&) {
    // The step has no guesses.
  }
}

void Speculation::Note(const Step& step) {
  if (!step.only_decodes) return times_.Restart();
  times_.Note(step.requests, step.guesses, step.seconds - work_.seconds);
}

void Speculation::DropOrphans() {
  guessers_.remove_if(
      [](const auto& guesser) { return guesser->model().use_count() == 1; });
}

}  // namespace gkv
