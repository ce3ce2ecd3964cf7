#ifndef GEMMAKV_BASE_INSIDE_STEP_H_
#define GEMMAKV_BASE_INSIDE_STEP_H_

namespace gkv {

// Says, for as long as it lives, that this thread works for a step. The step
// does not end before that work does, so a call on this thread that waits for
// the step's own runner would wait for itself. A thread that calls code which
// may do that, such as code of a user, has one.
class InsideStep {
 public:
  // `runner` stands for the scheduler, or whatever else runs the step: any
  // address that belongs to it alone. Not null.
  explicit InsideStep(const void* runner) noexcept;
  ~InsideStep();
  InsideStep(const InsideStep&) = delete;
  InsideStep& operator=(const InsideStep&) = delete;

  // Returns the runner of the step that this thread works for, or null if it
  // works for none. In a child of fork() the thread that forked works for none,
  // since no step there waits for it.
  static const void* Runner() noexcept;

 private:
  const void* const before_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_INSIDE_STEP_H_
