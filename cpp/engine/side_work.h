#ifndef GEMMAKV_ENGINE_SIDE_WORK_H_
#define GEMMAKV_ENGINE_SIDE_WORK_H_

#include <exception>
#include <functional>

#include "base/inside_step.h"
#include "base/worker.h"

namespace gkv {

// Runs the work of constraints for a step on a thread of its own, while the
// scheduler's thread does something else for the same step.
class SideWork {
 public:
  // `runner`: see InsideStep.
  explicit SideWork(const void* runner) : runner_(runner) {}

  // Runs `work` after the work that was begun before; at once on this thread if
  // there is no thread or no memory. `work` must not throw, and must live until
  // it has run.
  void Begin(const std::function<void()>& work) noexcept {
    try {
      worker_.Post([this, &work] {
        const InsideStep inside(runner_);
        work();
      });
    } catch (const std::exception&) {
      worker_.Wait();  // earlier work comes first
      work();
    }
  }
  void Wait() noexcept { worker_.Wait(); }
  // Returns false if some work has not run at `until`.
  bool Wait(Worker::Clock::time_point until) noexcept {
    return worker_.Wait(until);
  }

 private:
  const void* const runner_;
  Worker worker_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SIDE_WORK_H_
