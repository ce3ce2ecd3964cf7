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
    work_ = &work;
  }
  changed_.notify_all();
}

void SideThread::Wait() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return work_ == nullptr; });
}

void SideThread::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || work_ != nullptr; });
    if (stopping_) return;
    lock.unlock();
    (*work_)();
    lock.lock();
    work_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace gkv
