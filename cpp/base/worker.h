#ifndef GEMMAKV_BASE_WORKER_H_
#define GEMMAKV_BASE_WORKER_H_

#include <chrono>
#include <functional>
#include <memory>

namespace gkv {

// A thread that runs tasks one after the other, in the order in which they were
// posted.
//
// Tasks wait in one list. The first Post() starts the thread, which takes them
// from the list one by one and runs each without a lock. One mutex guards the
// list, the handle of the thread and the flags. The thread has a share in all
// of these, so it may outlive the worker after Abandon(). It may run on every
// processor that the posting thread could use without a ScopedPin.
//
// The owner of a worker posts, waits and, where a task does not come to its
// end, abandons. A task must not throw, nor wait for its own worker. What a
// task refers to must outlive the task, also if it is abandoned: the task owns
// that, or has a share in it.
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

  // Adds a task to the list. Throws std::system_error if the system has no
  // thread, or in a child of fork(), and std::bad_alloc; then the task is not
  // posted. Requires: not abandoned.
  void Post(Task task);
  // Returns when all tasks that were posted have run, or were abandoned.
  void Wait() noexcept;
  // The same, but returns false if that is not so at `until`.
  bool Wait(Clock::time_point until) noexcept;
  // Drops the tasks that have not begun. The thread ends after the task that it
  // runs; nobody waits for it.
  void Abandon() noexcept;
  // Whether this process is a child of the one that made the worker.
  bool in_child() const;

 private:
  struct State;
  static void Loop(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

// Runs a task on a thread of its own, which nobody waits for. Throws
// std::system_error and std::bad_alloc; then the task does not run.
void RunElsewhere(Worker::Task task);

}  // namespace gkv

#endif  // GEMMAKV_BASE_WORKER_H_
