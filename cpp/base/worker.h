#ifndef GEMMAKV_BASE_WORKER_H_
#define GEMMAKV_BASE_WORKER_H_

#include <chrono>
#include <functional>
#include <memory>

namespace gkv {

// A thread that runs tasks one after the other, in the order in which they were
// posted. It starts with the first task, and may run on all processors that the
// thread may which posts that: a ScopedPin there does not count.
//
// Its owner posts, waits and, where a task does not come to its end, abandons.
// A task must not throw, nor wait for its own worker. What it refers to must
// outlive it, also where it is abandoned: it owns that, or has a share in it.
//
// In a child of fork() the thread does not exist: nothing is posted, nothing is
// waited for, and the destructor returns at once. Thread-safe, except for the
// destructor.
class Worker {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;

  Worker();
  // Waits for all tasks, unless they were abandoned.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Throws std::system_error if the system has no thread, or this is a child of
  // fork(), and std::bad_alloc. The task is not posted then. Requires: not
  // abandoned.
  void Post(Task task);
  // Returns when all tasks have run that were posted.
  void Wait() noexcept;
  // The same, but returns false if that is not so at `until`.
  bool Wait(Clock::time_point until) noexcept;
  // Forgets the tasks that have not begun, and leaves the thread to the one that
  // runs.
  void Abandon() noexcept;
  // Whether this process is a child of the one that made this.
  bool in_child() const;

 private:
  struct State;
  static void Loop(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

// Runs a task on a thread of its own, which nobody waits for. Throws
// std::system_error and std::bad_alloc, then it does not run.
void RunElsewhere(Worker::Task task);

}  // namespace gkv

#endif  // GEMMAKV_BASE_WORKER_H_
