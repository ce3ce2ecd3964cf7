#ifndef GEMMAKV_ENGINE_STEP_WAIT_H_
#define GEMMAKV_ENGINE_STEP_WAIT_H_

#include <utility>

namespace gkv {

// Says that a step waits for another runner, as when the logits_processor of
// one model calls another model. Runners are those of InsideStep. The
// constructor refuses a wait that would close a circle with the known ones:
// steps that wait for each other would wait for ever. Thread-safe.
class StepWait {
 public:
  // Says that this thread is going to wait for `runner`; has no effect in a
  // thread that works for no step. Throws Busy if this thread works for a step
  // of that very runner, or for one that a step of the runner waits for,
  // directly or not; and std::bad_alloc.
  explicit StepWait(const void* runner);
  StepWait(StepWait&& other) noexcept
      : step_(std::exchange(other.step_, nullptr)), runner_(other.runner_) {}
  StepWait& operator=(StepWait&& other) noexcept {
    std::swap(step_, other.step_);
    std::swap(runner_, other.runner_);
    return *this;
  }
  ~StepWait();

  // The runner of the waiting step; null: none waits.
  const void* step() const { return step_; }

  // Throws Busy if this thread works for a step of `runner`.
  static void CheckNotInside(const void* runner);

 private:
  const void* step_;
  const void* runner_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STEP_WAIT_H_
