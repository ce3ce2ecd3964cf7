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

// Asks constraints what they force, on the thread of the masks, while others
// guess. Those that answer late have the next step go without.
class ForcedGuesser : public Guesser {
 public:
  // `side_work` is not owned. Whoever runs steps waits for it before a request
  // that was asked for ends.
  explicit ForcedGuesser(SideWork& side_work);

  void Ask(std::span<Candidate* const> round,
           const GuessCosts& costs) noexcept override;
  // Proposes what is forced, in place of guesses that say otherwise.
  void Propose(std::span<Candidate* const> round,
               const GuessCosts& costs) noexcept override;

 private:
  SideWork& side_work_;
  const std::function<void()> compute_;
  std::vector<Candidate*> asked_;  // in this order
  std::atomic<size_t> done_ = 0;   // so many of them
  size_t turn_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_FORCED_GUESSER_H_
