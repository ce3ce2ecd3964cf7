#ifndef GEMMAKV_ENGINE_FORCED_GUESSER_H_
#define GEMMAKV_ENGINE_FORCED_GUESSER_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "engine/guesser.h"
#include "engine/side_work.h"

namespace gkv {

// Asks constraints for forced tokens, on the thread that computes masks, while
// other guessers work. The step does not wait for late answers.
class ForcedGuesser : public Guesser {
 public:
  // `side_work` is not owned. The StepRunner waits for it before a request that
  // was asked for is destroyed.
  explicit ForcedGuesser(SideWork& side_work);

  void Ask(std::span<Candidate* const> round,
           const GuessCosts& costs) noexcept override;
  // Proposes the forced tokens, in place of other guesses.
  void Propose(std::span<Candidate* const> round,
               const GuessCosts& costs) noexcept override;

 private:
  SideWork& side_work_;
  const std::function<void()> compute_;
  std::vector<Candidate*> asked_;  // in this order
  std::atomic<size_t> done_ = 0;   // so many of them have answered
  size_t turn_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_FORCED_GUESSER_H_
