#ifndef GEMMAKV_STORE_REMOTE_CALLS_H_
#define GEMMAKV_STORE_REMOTE_CALLS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace gkv {

struct RemoteCallOptions {
  // What a caller waits for at most.
  std::chrono::nanoseconds timeout = std::chrono::seconds(1);
  // Between a failure and the next attempt: doubled by each further one.
  std::chrono::nanoseconds first_backoff = std::chrono::milliseconds(500);
  std::chrono::nanoseconds longest_backoff = std::chrono::seconds(60);
  // Calls at a time, those included that nobody waits for any more.
  size_t max_calls = 8;
};

struct RemoteCallStats {
  uint64_t calls = 0;     // begun; probes are none
  uint64_t failures = 0;  // calls that threw
  uint64_t timeouts = 0;  // calls that were abandoned
  uint64_t refused = 0;   // calls not begun: open, or all threads in use
  uint64_t opened = 0;    // times that the breaker opened, or stayed open
  bool reads_open = false;
  bool writes_open = false;
  size_t running = 0;  // threads in a call now
  std::string last_error;
};

// Calls of something that may be slow, dead or hanging, each on a thread of its
// own, which is abandoned when it is late: its work then finds that out at its
// next Step and ends. Work owns all that it touches.
//
// Two circuit breakers, for reading and writing. A failure opens that of its
// side, a late call both: calls are refused at once. An open one for reading
// closes when a probe succeeds, which runs beside callers when one comes by
// after the back-off; an open one for writing lets one call through then. While
// an abandoned call has not had the time-out for its own step yet, all calls
// are refused. Thread-safe. May be destroyed while abandoned calls run.
class RemoteCalls {
 public:
  enum class Side { kRead, kWrite };
  class Call;
  // Throws a std::exception for what fails.
  using Work = std::function<void(Call&)>;

  RemoteCalls(const RemoteCallOptions& options, Work probe);

  // Whether `work` came to its end without throwing and within the time-out: a
  // time-out for all of it for reading, for each of its steps for writing.
  bool Run(Side side, Work work);

  RemoteCallStats stats() const;

 private:
  struct State;
  static void Launch(const std::shared_ptr<State>& state,
                     const std::shared_ptr<Call>& call, Work work);

  std::shared_ptr<State> state_;
};

// One piece of work, as the work sees it.
class RemoteCalls::Call {
 public:
  // Before each thing that may hang: false if nobody waits any more, then the
  // work should end.
  bool Step();

 private:
  friend class RemoteCalls;
  using Clock = std::chrono::steady_clock;
  Call(std::shared_ptr<State> state, Side side, bool probe)
      : state_(std::move(state)), side_(side), probe_(probe) {}

  const std::shared_ptr<State> state_;
  const Side side_;
  const bool probe_;
  // Guarded by the state's mutex.
  Clock::time_point step_began_;
  bool done_ = false;
  bool failed_ = false;
  bool abandoned_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_REMOTE_CALLS_H_
