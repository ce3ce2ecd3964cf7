#ifndef GEMMAKV_ENGINE_MODEL_DRAFTER_H_
#define GEMMAKV_ENGINE_MODEL_DRAFTER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "engine/guesser.h"
#include "engine/learned.h"
#include "model/forward.h"

namespace gkv {

// The work of all draft models of one scheduler.
struct DraftWork {
  std::atomic<size_t> rows = 0;  // that they computed; any thread may read this
  double seconds = 0;            // that they took
};

// A model that guesses the next tokens of another one, the target. It runs on
// the target's scheduler thread, between two steps, for all of its requests at
// once: in rounds, each of which makes one more guess for each request.
//
// It learns how long rounds take and, for each request, how often its guesses
// are right. If they do not pay, it tries now and then, for a small share of
// the time, whether they would be right.
//
// A lack of memory means no guesses. Any other error of a step of the model
// fails the requests that it was to guess for, and leaves every conversation
// sound.
class ModelDrafter : public Guesser {
 public:
  ModelDrafter(const ModelDrafter&) = delete;

  const std::shared_ptr<const Model>& model() const noexcept override {
    return model_;
  }

  void Propose(std::span<Candidate* const> round,
               const GuessCosts& costs) noexcept override;
  void Make(const GuessCosts& costs) noexcept override;

 protected:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMaxRequests = 32;  // of one round

  // `size_share`: the model's size as a share of the target's, which gives an
  // estimate of the time of a round before one was measured. `work` is not
  // owned.
  ModelDrafter(std::shared_ptr<const Model> model, double size_share,
               DraftWork& work);

  // Sets the offers of requests that name this model, of at most kMaxRequests.
  // May throw.
  virtual void Offer(std::span<Candidate* const> requests,
                     const GuessCosts& costs) = 0;
  // Makes the guesses of requests with an offer. May throw.
  virtual void MakeGuesses(const GuessCosts& costs) = 0;

  // Compares a request's last guesses with what it has said since.
  void Judge(Candidate& candidate);
  void Learn(Candidate& candidate, bool was_right);
  // Returns an offer to guess for the request, with the known times of rounds.
  GuessOffer OfferTo(const Candidate& candidate, double first_cost) const;
  // Whether it is time to spend so many seconds on a trial whether guesses
  // would be right. If so, counts them.
  static bool Try(Candidate& candidate, double seconds);
  // Notes a guess, if some are `left` to make. Returns whether another follows.
  static bool Add(Candidate& candidate, RowConsumer::Guess guess, size_t& left);

  // Returns the time of a round of so many requests.
  double RoundSeconds(size_t requests, double step_s) const;
  void NoteRound(size_t requests, double seconds);
  void CountRows(size_t rows) { work_.rows += rows; }
  static double SecondsSince(Clock::time_point time);

  const std::shared_ptr<const Model> model_;

 private:
  template <typename Function>
  void RunGuarded(const Function& function) noexcept;

  const double size_share_;
  DraftWork& work_;
  LearnedMean right_;  // share of right guesses, over all requests
  std::array<LearnedTime, kMaxRequests> rounds_ = {};  // [i]: of i + 1 requests
  std::array<double, kMaxRequests> round_seconds_ = {};  // of the step's offers
  std::vector<Candidate*> requests_;  // that name this model, in this step
};

// Returns the bytes of all matrices of a model.
double MatrixBytes(const Model& model);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_MODEL_DRAFTER_H_
