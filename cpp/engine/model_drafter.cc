#include "engine/model_drafter.h"

#include <algorithm>
#include <new>
#include <utility>

namespace gkv {
namespace {

// The share of right guesses before it is known, and the weight of that.
constexpr double kFirstRight = 0.7, kFirstWeight = 8;
// The shares of right guesses are learned from the last so many guesses: of one
// request, and of all.
constexpr double kLately = 40, kLatelyInAll = 400;
// Weight of the share of other requests in a request that begins.
constexpr double kOthersWeight = 6;
// The share of the time that trials may take.
constexpr double kTryShare = 0.01;

}  // namespace

double MatrixBytes(const Model& model) {
  double bytes = 0;
  for (const MatrixInfo& m : model.weights.matrices) {
    bytes += static_cast<double>(m.rows * RowBytes(m.type, m.cols));
  }
  return bytes;
}

ModelDrafter::ModelDrafter(std::shared_ptr<const Model> model,
                           double size_share, DraftWork& work)
    : model_(std::move(model)),
      size_share_(size_share),
      work_(work),
      right_{kFirstRight, kFirstWeight} {}

template <typename Function>
void ModelDrafter::RunGuarded(const Function& function) noexcept {
  const Clock::time_point begin = Clock::now();
  try {
    function();
  } catch (const std::bad_alloc&) {
    // There are no guesses.
  } catch (...) {
    for (Candidate* const c : requests_) {
      c->error = std::current_exception();
      c->offer = {};
      c->Forget();
    }
  }
  work_.seconds += SecondsSince(begin);
}

void ModelDrafter::Propose(std::span<Candidate* const> round,
                           const GuessCosts& costs) noexcept {
  requests_.clear();
  if (costs.reads_prompts || costs.step <= 0) return;
  RunGuarded([&] {
    // Without memory for all, nobody is asked.
    requests_.reserve(round.size());
    for (Candidate* const c : round) {
      if (c->is_new && c->sources.model == model_ && c->proposed.empty()) {
        requests_.push_back(c);
      }
    }
    for (size_t i = 0; i < kMaxRequests; ++i) {
      round_seconds_[i] = costs.always ? 0 : RoundSeconds(i + 1, costs.step);
    }
    Offer(requests_, costs);
  });
}

void ModelDrafter::Make(const GuessCosts& costs) noexcept {
  if (requests_.empty()) return;
  RunGuarded([&] { MakeGuesses(costs); });
}

void ModelDrafter::Judge(Candidate& candidate) {
  Candidate::Record& record = candidate.record;
  if (record.right.weight == 0) record.right = {right_.value, kOthersWeight};
  const size_t length = candidate.cache->length();
  for (size_t i = 0; i < record.guesses.size(); ++i) {
    const size_t position = record.guessed_at + i;
    if (position >= length) break;
    int32_t token;
    candidate.cache->CopyTokens(position, {&token, 1});
    const bool was_right = token == record.guesses[i];
    Learn(candidate, was_right);
    record.judged = position + 1;
    if (!was_right) break;
  }
  record.guesses.clear();
  record.guessed_at = length;
}

void ModelDrafter::Learn(Candidate& candidate, bool was_right) {
  candidate.record.right.Note(was_right ? 1 : 0, kLately);
  right_.Note(was_right ? 1 : 0, kLatelyInAll);
}

GuessOffer ModelDrafter::OfferTo(const Candidate& candidate,
                                 double first_cost) const {
  return {.right = candidate.record.right.value,
          .most = candidate.most,
          .first_cost = first_cost,
          .rounds = round_seconds_};
}

bool ModelDrafter::Try(Candidate& candidate, double seconds) {
  Candidate::Record& record = candidate.record;
  if (record.tried_s + seconds >= kTryShare * record.decoded_s) return false;
  record.tried_s += seconds;
  return true;
}

bool ModelDrafter::Add(Candidate& candidate, RowConsumer::Guess guess,
                       size_t& left) {
  if (left == 0 || guess.id < 0) return false;
  candidate.record.guesses.push_back(guess.id);
  if (candidate.planned > 0) {
    candidate.proposed.push_back({guess.id, candidate.record.right.value});
  }
  return --left > 0 && !guess.last;
}

double ModelDrafter::RoundSeconds(size_t requests, double step_s) const {
  const size_t at = std::min(requests, kMaxRequests) - 1;
  const auto known = [this](size_t i) { return rounds_[i].seconds(); };
  if (known(at) > 0) return known(at);
  // The time for the nearest known number; more requests take longer.
  for (size_t i = at; i-- > 0;) {
    if (known(i) > 0) {
      return known(i) * (1 + 0.05 * static_cast<double>(at - i));
    }
  }
  for (size_t i = at + 1; i < kMaxRequests; ++i) {
    if (known(i) > 0) return known(i);
  }
  return step_s * size_share_;
}

void ModelDrafter::NoteRound(size_t requests, double seconds) {
  rounds_[requests - 1].Note(seconds);
}

double ModelDrafter::SecondsSince(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

}  // namespace gkv
