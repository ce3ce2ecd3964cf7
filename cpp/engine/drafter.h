#ifndef GEMMAKV_ENGINE_DRAFTER_H_
#define GEMMAKV_ENGINE_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/guesser.h"

namespace gkv {

// Guesses what one request says next. Calls come from the scheduler's thread;
// what Propose throws fails its request alone.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // In each call, `added` are the tokens of the transcript since the last one,
  // all of them at the first.

  // While the prompt is being read: nothing is asked for yet. The first `known`
  // tokens of the transcript were read by earlier requests.
  virtual void Read(std::span<const int32_t> added, size_t known) noexcept = 0;
  // Writes guesses for the tokens that follow, and returns how many.
  virtual size_t Propose(std::span<const int32_t> added,
                         std::span<DraftGuess> guesses) = 0;
  // The request is over.
  virtual void End(std::span<const int32_t> added) noexcept { (void)added; }
};

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

#endif  // GEMMAKV_ENGINE_DRAFTER_H_
