#ifndef GEMMAKV_ENGINE_SIDE_THREAD_H_
#define GEMMAKV_ENGINE_SIDE_THREAD_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gkv {

// A thread that does one thing at a time while another one does something else;
// it starts when it is first needed. Used by one thread.
class SideThread {
 public:
  SideThread() = default;
  ~SideThread();
  SideThread(const SideThread&) = delete;

  // Has `work` done; it must not throw and must live until Wait() returns.
  // Requires: what began before was waited for. Throws std::system_error if the
  // system refuses a thread.
  void Begin(const std::function<void()>& work);
  // Until it is done.
  void Wait() noexcept;

 private:
  void Loop();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;  // null: done
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SIDE_THREAD_H_
