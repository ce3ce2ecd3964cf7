#ifndef GEMMAKV_ENGINE_CONSTRAINT_H_
#define GEMMAKV_ENGINE_CONSTRAINT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace gkv {

// Says which tokens may come next, given the tokens before: a grammar, a
// schema. Each request has a clone of its own. Calls come from the scheduler's
// threads, one at a time. An exception fails its request alone.
class Constraint {
 public:
  virtual ~Constraint() = default;

  // Sets bit (id % 32) of mask[id / 32] for every token that may come next and
  // clears the others; stop ids are not its business. Returns whether the text
  // may end here: then a stop id may come too, and if nothing else may, the
  // request ends. Called while a step of the model runs.
  virtual bool ComputeMask(std::span<uint32_t> mask) = 0;
  // Writes the tokens that come next if only one continuation is possible, as
  // far as that is known at once, and returns how many there are. They are
  // guesses: wrong ones cost time, and no bit. Called between two steps, which
  // do not wait for it; a call must have no lasting effect.
  virtual size_t Forced(std::span<int32_t> tokens) {
    (void)tokens;
    return 0;
  }
  // Notes that `token` comes next. Requires: the last mask has it.
  virtual void Accept(int32_t token) = 0;
  // Takes back the last `count` accepted tokens. Requires: there are so many.
  virtual void Rollback(size_t count) = 0;
  // Returns an independent constraint in the same state.
  virtual std::unique_ptr<Constraint> Clone() const = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_CONSTRAINT_H_
