#ifndef GEMMAKV_ENGINE_DRAFTER_GUESSER_H_
#define GEMMAKV_ENGINE_DRAFTER_GUESSER_H_

#include <span>

#include "engine/guesser.h"

namespace gkv {

// Asks each request's own Drafter.
class DrafterGuesser : public Guesser {
 public:
  void Propose(std::span<Candidate* const> round,
               const GuessCosts& costs) noexcept override;

  // Tells the drafter, if there is one, that the request is over, and the
  // tokens that it was not asked after any more; lets go of it.
  static void End(Candidate& candidate) noexcept;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFTER_GUESSER_H_
