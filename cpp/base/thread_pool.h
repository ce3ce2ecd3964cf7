#ifndef GEMMAKV_BASE_THREAD_POOL_H_
#define GEMMAKV_BASE_THREAD_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <system_error>

#include "base/step_clock.h"
#include "gemmakv/error.h"
#include "gemmakv/threads.h"

namespace gkv {

// A fixed set of threads that run the tasks of one parallel loop at a time.
//
// Run() starts a loop. The thread that calls it takes part as thread 0; the
// others are workers, which live as long as the pool. Threads take the tasks of
// a loop one by one from a common atomic counter, and hold no lock while they
// run them. A worker that finds no task left spins for a short while, since a
// decode step has about a hundred loops, and then parks on a condition
// variable, so an idle pool uses no processor time. The next Run() wakes it.
// Run() itself spins and parks in the same way until all tasks have returned.
// Which thread runs which task is left to chance, so callers must make tasks
// independent: then results do not depend on it.
class ThreadPool {
 public:
  // `num_threads` counts the caller of Run: 1 starts no thread. `processors`
  // has none, or one for each thread, to which the thread is pinned. The first
  // is the caller's, who holds a ScopedPin on it while it calls Run.
  // Throws InvalidArgument outside [1, kMaxThreads], IoError if the operating
  // system refuses a thread, or to pin it, and std::bad_alloc.
  explicit ThreadPool(size_t num_threads,
                      std::span<const Processor> processors = {});
  // Requires: no Run in progress.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr size_t kMaxThreads = 256;

  // Makes the error of a thread that the operating system refused.
  static IoError Refused(size_t started, size_t num_threads,
                         const std::system_error& error);

  // The most scratch memory that a task needs. Stacks may be too small for it.
  static constexpr size_t kScratchBytes = 308 * 1024;

  size_t num_threads() const { return num_threads_; }

  // Returns memory [kScratchBytes], aligned to 64 bytes, for the task that
  // `thread` runs. Its content is whatever the last task has left there. It
  // takes no memory of the machine until it is used. A loop of one task that a
  // task runs has the memory of thread 0.
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

  // Returns the number of loops so far that several threads took part in. Each
  // costs the time of waking and joining them. Any thread may ask.
  size_t parallel_loops() const;

  // Sets the clock that measures what steps spend their time on; null for none.
  // Not owned. Requires: no step in progress.
  void set_clock(StepClock* clock) { clock_ = clock; }
  // Tells the clock that another part of a step begins. Called on the thread
  // that calls Run, outside of Run.
  void Enter(StepPart part) const {
    if (clock_ != nullptr) clock_->Enter(part);
  }

  // Returns the number of processors that the calling thread may use (affinity
  // mask), but at least 1 and at most kMaxThreads.
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
