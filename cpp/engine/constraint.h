#ifndef GEMMAKV_ENGINE_CONSTRAINT_H_
#define GEMMAKV_ENGINE_CONSTRAINT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace gkv {

// Which tokens may come next, given those that came before: a grammar, a
// schema. Each request has a clone of its own. Calls come from the scheduler's
// threads, one at a time; what a call throws fails its request alone.
class Constraint {
 public:
  virtual ~Constraint() = default;

  // Sets bit (id % 32) of mask[id / 32] for every token that may come next and
  // clears the others; stop ids are not its business. Returns whether the text
  // may end here: then a stop id may come too, and if nothing else may, the
  // request ends. Called while a step of the model runs.
  virtual bool ComputeMask(std::span<uint32_t> mask) = 0;
  // Writes the tokens that come next where the text can go on in one way alone,
  // as far as that is known at once, and returns how many there are. They are
  // guesses: wrong ones cost time, and no bit. Called between two steps, which
  // may not wait for it; nothing but time may come of a call.
  virtual size_t Forced(std::span<int32_t> tokens) {
    (void)tokens;
    return 0;
  }
  // `token` comes next. Requires: the last mask has it.
  virtual void Accept(int32_t token) = 0;
  // Takes back the last `count` accepted tokens. Requires: there are so many.
  virtual void Rollback(size_t count) = 0;
  // An independent constraint in the same state.
  virtual std::unique_ptr<Constraint> Clone() const = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_CONSTRAINT_H_
