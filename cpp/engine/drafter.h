#ifndef GEMMAKV_ENGINE_DRAFTER_H_
#define GEMMAKV_ENGINE_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/guesser.h"

namespace gkv {

// Guesses the next tokens of one request. Calls come from the scheduler's
// thread; an exception of Propose fails its request alone.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // In each call, `added` has the tokens of the transcript since the last call,
  // all of them at the first.

  // Called while the prompt is read, when no guesses are wanted. The first
  // `known` tokens of the transcript were read by earlier requests.
  virtual void Read(std::span<const int32_t> added, size_t known) noexcept = 0;
  // Writes guesses for the tokens that follow, and returns how many there are.
  virtual size_t Propose(std::span<const int32_t> added,
                         std::span<DraftGuess> guesses) = 0;
  // Called when the request is over.
  virtual void End(std::span<const int32_t> added) noexcept { (void)added; }
};

// Asks each request's own Drafter.
class DrafterGuesser : public Guesser {
 public:
  void Propose(std::span<Candidate* const> round,
               const GuessCosts& costs) noexcept override;

  // Tells the drafter, if there is one, the tokens that it has not seen and
  // that the request is over. Then releases it.
  static void End(Candidate& candidate) noexcept;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFTER_H_
