#ifndef GEMMAKV_ENGINE_DRAFTER_H_
#define GEMMAKV_ENGINE_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace gkv {

struct DraftGuess {
  int32_t id = 0;    // one of the model's
  double right = 1;  // how likely it is right, after guesses that are
};

// Guesses what one request says next; a DrafterGuesser asks it. How many of its
// guesses are computed is decided over all requests (speculation.h). Calls come
// from the scheduler's thread; what Propose throws fails its request alone.
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

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFTER_H_
