#ifndef GEMMAKV_BASE_THREAD_POOL_H_
#define GEMMAKV_BASE_THREAD_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/step_clock.h"
#include "gemmakv/threads.h"

namespace gkv {

// Fixed set of threads that run the tasks of one parallel loop at a time.
// Workers spin for a short while between loops (a decode step has about a
// hundred of them) and then park: an idle pool uses no processor time.
// Results never depend on which thread ran which task, so callers must make
// tasks independent.
class ThreadPool {
 public:
  // `num_threads` counts the caller of Run: 1 starts no thread. With
  // `processors`, one for each thread, they stay on them; the first is the
  // caller's, who holds a ScopedPin on it while it calls Run.
  // Throws InvalidArgument outside [1, kMaxThreads], IoError if the operating
  // system refuses a thread, or to pin it, and std::bad_alloc.
  explicit ThreadPool(size_t num_threads,
                      std::span<const Processor> processors = {});
  // Requires: no Run in progress.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr size_t kMaxThreads = 256;

  // The largest that a task needs; stacks may be small.
  static constexpr size_t kScratchBytes = 304 * 1024;

  size_t num_threads() const { return num_threads_; }

  // Memory [kScratchBytes], aligned to 64 bytes, for the task that `thread`
  // runs: its content is whatever the last task has left. It takes no memory
  // of the machine until it is used. A task that another one runs as a loop of
  // one task shares it with thread 0.
  uint8_t* scratch(size_t thread);

  // Calls fn(task, thread) once for each task in [0, num_tasks), thread in
  // [0, num_threads()), and returns when all have returned. Tasks are handed
  // out in ascending order, one at a time. `fn` must not throw and must not
  // call Run, but for that of a loop of one task, which the calling thread
  // runs by itself. Requires: one Run at a time, num_tasks < 2^32 - 1.
  // After fork() in the child the threads are gone; Run then runs every task
  // on the calling thread.
  template <typename Fn>
  void Run(size_t num_tasks, const Fn& fn) {
    RunErased(num_tasks, &fn, [](const void* f, size_t task, size_t thread) {
      (*static_cast<const Fn*>(f))(task, thread);
    });
  }

  // Loops so far that several threads took part in. Each costs the time of
  // waking and joining them. Any thread may ask.
  size_t parallel_loops() const;

  // Who is told what steps spend their time on; null: nobody. Not owned; no
  // step may be in progress.
  void set_clock(StepClock* clock) { clock_ = clock; }
  // On the thread that calls Run, outside of it: from now on it is this part of
  // a step.
  void Enter(StepPart part) const {
    if (clock_ != nullptr) clock_->Enter(part);
  }

  // Processors that this process may use (affinity mask), at least 1.
  static size_t AvailableProcessors();

 private:
  using ErasedFn = void (*)(const void* fn, size_t task, size_t thread);
  void RunErased(size_t num_tasks, const void* fn, ErasedFn call);

  struct Shared;
  size_t num_threads_;
  std::unique_ptr<Shared> shared_;
  StepClock* clock_ = nullptr;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_THREAD_POOL_H_
