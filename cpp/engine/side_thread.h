#ifndef GEMMAKV_ENGINE_SIDE_THREAD_H_
#define GEMMAKV_ENGINE_SIDE_THREAD_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>

namespace gkv {

// A thread that does one thing after the other while another one does something
// else; it starts when it is first needed. Used by one thread.
class SideThread {
 public:
  SideThread() = default;
  ~SideThread();
  SideThread(const SideThread&) = delete;

  // Has `work` done, behind what began before; it must not throw and must live
  // until all is done. Requires: of what began, one at most is not done. Throws
  // std::system_error if the system refuses a thread.
  void Begin(const std::function<void()>& work);
  // Until all is done.
  void Wait() noexcept;
  // The same, so long at most. Returns whether all is done.
  bool WaitFor(std::chrono::duration<double> time);

 private:
  void Loop();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::array<const std::function<void()>*, 2> work_ = {};  // the first runs
  size_t count_ = 0;                                       // of them
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SIDE_THREAD_H_
