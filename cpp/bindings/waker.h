#ifndef GEMMAKV_BINDINGS_WAKER_H_
#define GEMMAKV_BINDINGS_WAKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "cache/run_lock.h"
#include "io/wake_pipe.h"

namespace gkv {

// Wakes one event loop through a pipe that the loop watches. A thread that has
// news needs no interpreter lock, and many news at once wake the loop once.
// Thread-safe.
class Waker : public std::enable_shared_from_this<Waker> {
 public:
  // Throws IoError if the process has no file descriptors left.
  Waker() = default;
  Waker(const Waker&) = delete;

  // Readable while there is news.
  int fd() const { return pipe_.descriptor(); }
  // Returns the keys of the bells that rang since the last call.
  std::vector<uint64_t> Take();

 private:
  friend class Bell;
  struct Line {
    uint64_t key;
    bool rang = false;
  };
  std::shared_ptr<Line> AddLine();
  void Ring(Line& line) noexcept;

  Mutex mutex_{AtFork::kWaits};
  WakePipe pipe_;
  uint64_t next_key_ GUARDED_BY(mutex_) = 0;
  // It has room for all lines that there are, so that ringing allocates
  // nothing.
  std::vector<uint64_t> news_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Line>> lines_ GUARDED_BY(mutex_);
};

// The bell of one call that a loop waits for.
class Bell {
 public:
  using Callback = std::shared_ptr<const std::function<void()>>;

  explicit Bell(const std::shared_ptr<Waker>& waker);
  uint64_t key() const { return key_; }
  // Rings the bell. May be called on any thread, also after the bell is gone.
  const Callback& ring() const { return ring_; }
  // How the call waits for the locks of its caches.
  LockWait& lock_wait() { return lock_wait_; }

 private:
  uint64_t key_ = 0;
  Callback ring_;
  LockWait lock_wait_;
};

}  // namespace gkv

#endif  // GEMMAKV_BINDINGS_WAKER_H_
