#include "engine/side_thread.h"

#include "base/processors.h"

namespace gkv {

SideThread::~SideThread() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SideThread::Begin(const std::function<void()>& work) {
  if (!thread_.joinable()) thread_ = std::thread(Unpinned([this] { Loop(); }));
  {
    const std::lock_guard lock(mutex_);
    work_[count_++] = &work;
  }
  changed_.notify_all();
}

void SideThread::Wait() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return count_ == 0; });
}

bool SideThread::WaitFor(std::chrono::duration<double> time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return count_ == 0; });
}

void SideThread::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || count_ > 0; });
    if (stopping_) return;
    const std::function<void()>& work = *work_[0];
    lock.unlock();
    work();
    lock.lock();
    work_[0] = work_[1];
    if (--count_ == 0) changed_.notify_all();
  }
}

}  // namespace gkv
