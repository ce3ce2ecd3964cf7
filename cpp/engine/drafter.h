#ifndef GEMMAKV_ENGINE_DRAFTER_H_
#define GEMMAKV_ENGINE_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace gkv {

// What guesses of one sequence cost in the step that is being made.
struct DraftPrice {
  // Tokens that the step brings without them.
  size_t tokens = 1;
  // [i]: how much longer a step takes with i + 1 guesses, as a share of what it
  // takes without. Empty: guesses do not pay now.
  std::span<const double> extra = {};
};

// Guesses what a sequence says next. Guesses are computed in the same step as
// the token before them and count as far as they turn out right: they change
// how many steps it takes, and no bit of the result. Calls come from the
// scheduler's thread; what a call throws fails its request alone.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // `added` are the tokens of the transcript since the last call, of the whole
  // transcript at the first. Writes guesses for those that follow, and returns
  // how many; ids must be the model's.
  virtual size_t Propose(std::span<const int32_t> added,
                         const DraftPrice& price,
                         std::span<int32_t> guesses) = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_DRAFTER_H_
