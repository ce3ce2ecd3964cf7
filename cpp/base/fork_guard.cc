#include "base/fork_guard.h"

#include <pthread.h>

#include <chrono>
#include <set>
#include <thread>

namespace gkv {
namespace {

struct Guarded {
  std::mutex mutex;  // guards what follows
  std::set<std::mutex*> all;
};

Guarded& TheGuarded() {
  // Never destroyed: guards may outlive static destruction.
  static auto* const guarded = new Guarded;
  return *guarded;
}

bool TryLockAll() {
  Guarded& guarded = TheGuarded();
  guarded.mutex.lock();
  for (auto at = guarded.all.begin(); at != guarded.all.end(); ++at) {
    if ((*at)->try_lock()) continue;
    while (at != guarded.all.begin()) (*--at)->unlock();
    guarded.mutex.unlock();
    return false;
  }
  return true;
}

// All at once or none: so the order in which others lock them does not matter.
void LockAll() {
  while (!TryLockAll()) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void UnlockAll() {
  Guarded& guarded = TheGuarded();
  for (std::mutex* const mutex : guarded.all) mutex->unlock();
  guarded.mutex.unlock();
}

}  // namespace

ForkGuard::ForkGuard(std::mutex& mutex) : mutex_(mutex) {
  [[maybe_unused]] static const int once =
      pthread_atfork(&LockAll, &UnlockAll, &UnlockAll);
  Guarded& guarded = TheGuarded();
  const std::lock_guard lock(guarded.mutex);
  guarded.all.insert(&mutex);
}

ForkGuard::~ForkGuard() {
  Guarded& guarded = TheGuarded();
  const std::lock_guard lock(guarded.mutex);
  guarded.all.erase(&mutex_);
}

}  // namespace gkv
