#include "base/worker.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/fork_guard.h"
#include "base/processors.h"

namespace gkv {

struct Worker::State {
  // Whether nothing is left to be run, or to be waited for.
  bool Idle() const { return abandoned || (tasks.empty() && !running); }

  const pid_t pid = getpid();
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<Task> tasks;  // that have not begun
  bool running = false;    // a task
  bool stopping = false;
  bool abandoned = false;
  std::thread thread;
  const ForkGuard guard{mutex, &changed};
};

Worker::Worker() : state_(std::make_shared<State>()) {}

Worker::~Worker() {
  State& state = *state_;
  if (in_child()) {
    // The parent has the thread: its handle can be neither joined nor dropped.
    if (state.thread.joinable()) (void)new std::thread(std::move(state.thread));
    return;
  }
  {
    const std::lock_guard lock(state.mutex);
    state.stopping = true;
  }
  state.changed.notify_all();
  if (state.thread.joinable()) state.thread.join();
}

bool Worker::in_child() const { return getpid() != state_->pid; }

void Worker::Post(Task task) {
  State& state = *state_;
  if (in_child()) {
    throw std::system_error(
        std::make_error_code(std::errc::operation_not_permitted),
        "a thread of the process that was forked");
  }
  {
    const std::lock_guard lock(state.mutex);
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
  state.changed.notify_all();
}

void Worker::Loop(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(
        lock, [&] { return state.stopping || !state.tasks.empty(); });
    if (state.tasks.empty()) return;
    Task task = std::move(state.tasks.front());
    state.tasks.pop_front();
    state.running = true;
    lock.unlock();
    task();
    task = nullptr;  // before anybody hears that it has run
    lock.lock();
    state.running = false;
    if (state.abandoned) return;
    if (state.tasks.empty()) state.changed.notify_all();
  }
}

void Worker::Wait() noexcept {
  if (in_child()) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->Idle(); });
}

bool Worker::Wait(Clock::time_point until) noexcept {
  if (in_child()) return true;
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_until(lock, until,
                                    [&] { return state_->Idle(); });
}

void Worker::Abandon() noexcept {
  if (in_child()) return;
  State& state = *state_;
  std::deque<Task> dropped;  // destroyed after the lock is released
  {
    const std::lock_guard lock(state.mutex);
    state.stopping = state.abandoned = true;
    state.tasks.swap(dropped);
    if (state.thread.joinable()) state.thread.detach();
  }
  state.changed.notify_all();
}

void RunElsewhere(Worker::Task task) {
  std::thread(Unpinned(std::move(task))).detach();
}

}  // namespace gkv
