#ifndef GEMMAKV_BASE_INSIDE_STEP_H_
#define GEMMAKV_BASE_INSIDE_STEP_H_

namespace gkv {

// While it lives, this thread works for a step, which does not end before that
// work: whatever waits for the step's own runner would wait for itself. A
// thread that does not know what it calls, as where it calls code of a user,
// has one.
class InsideStep {
 public:
  // `runner` is whoever runs the step, as a scheduler, by any address that is
  // its alone. Not null.
  explicit InsideStep(const void* runner) noexcept;
  ~InsideStep();
  InsideStep(const InsideStep&) = delete;
  InsideStep& operator=(const InsideStep&) = delete;

  // The runner of the step that this thread works for; null: it works for none.
  // In a child of fork() the thread that forked works for none: nobody there
  // waits for it.
  static const void* Runner() noexcept;

 private:
  const void* const before_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_INSIDE_STEP_H_
