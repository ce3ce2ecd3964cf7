#include "base/worker.h"

#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/own_process.h"
#include "base/processors.h"

namespace gkv {

struct Worker::State {
  // Whether nothing is left to be run, or to be waited for.
  bool Idle() const REQUIRES(mutex) {
    return abandoned || (tasks.empty() && !running);
  }

  const OwnProcess process;
  Mutex mutex{AtFork::kWaits};
  Condition changed{mutex};
  std::deque<Task> tasks GUARDED_BY(mutex);  // that have not begun
  bool running GUARDED_BY(mutex) = false;    // whether a task runs
  bool stopping GUARDED_BY(mutex) = false;
  bool abandoned GUARDED_BY(mutex) = false;
  std::thread thread GUARDED_BY(mutex);
};

Worker::Worker() : state_(std::make_shared<State>()) {}

Worker::~Worker() {
  State& state = *state_;
  if (in_child()) {
    // The parent has the thread: its handle can be neither joined nor freed.
    if (state.thread.joinable()) (void)new std::thread(std::move(state.thread));
    return;
  }
  {
    const MutexLock lock(state.mutex);
    state.stopping = true;
  }
  state.changed.NotifyAll();
  if (state.thread.joinable()) state.thread.join();
}

bool Worker::in_child() const { return state_->process.InChild(); }

void Worker::Post(Task task) {
  State& state = *state_;
  if (in_child()) {
    throw std::system_error(
        std::make_error_code(std::errc::operation_not_permitted),
        "a thread of the process that was forked");
  }
  {
    const MutexLock lock(state.mutex);
    state.tasks.push_back(std::move(task));
    if (!state.thread.joinable()) {
      try {
        state.thread =
            std::thread(Unpinned([shared = state_] { Loop(shared); }));
      } catch (...) {
        task = std::move(state.tasks.back());  // destroyed without the lock
        state.tasks.pop_back();
        throw;
      }
    }
  }
  state.changed.NotifyAll();
}

void Worker::Loop(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  MutexLock lock(state.mutex);
  while (true) {
    while (!state.stopping && state.tasks.empty()) state.changed.Wait(lock);
    if (state.tasks.empty()) return;
    Task task = std::move(state.tasks.front());
    state.tasks.pop_front();
    state.running = true;
    lock.Unlock();
    task();
    task = nullptr;  // destroyed before Wait() returns
    lock.Lock();
    state.running = false;
    if (state.abandoned) return;
    if (state.tasks.empty()) state.changed.NotifyAll();
  }
}

void Worker::Wait() noexcept {
  if (in_child()) return;
  State& state = *state_;
  MutexLock lock(state.mutex);
  while (!state.Idle()) state.changed.Wait(lock);
}

bool Worker::Wait(Clock::time_point until) noexcept {
  if (in_child()) return true;
  State& state = *state_;
  MutexLock lock(state.mutex);
  while (!state.Idle()) {
    if (!state.changed.WaitUntil(lock, until)) return state.Idle();
  }
  return true;
}

void Worker::Abandon() noexcept {
  if (in_child()) return;
  State& state = *state_;
  std::deque<Task> dropped;  // destroyed after the lock is released
  {
    const MutexLock lock(state.mutex);
    state.stopping = state.abandoned = true;
    state.tasks.swap(dropped);
    if (state.thread.joinable()) state.thread.detach();
  }
  state.changed.NotifyAll();
}

void RunElsewhere(Worker::Task task) {
  std::thread(Unpinned(std::move(task))).detach();
}

}  // namespace gkv
