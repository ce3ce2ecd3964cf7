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
  // The longest wait of a caller.
  std::chrono::nanoseconds timeout = std::chrono::seconds(1);
  // The pause between a failure and the next attempt; each further failure
  // doubles it.
  std::chrono::nanoseconds first_backoff = std::chrono::milliseconds(500);
  std::chrono::nanoseconds longest_backoff = std::chrono::seconds(60);
  // The most calls at a time, including those that nobody waits for any more.
  size_t max_calls = 8;
};

struct RemoteCallStats {
  uint64_t calls = 0;     // without probes
  uint64_t failures = 0;  // calls that threw
  uint64_t timeouts = 0;  // calls that were abandoned
  uint64_t refused = 0;   // calls not begun: open, or all threads in use
  uint64_t opened = 0;    // times that the breaker opened, or stayed open
  bool reads_open = false;
  bool writes_open = false;
  size_t running = 0;  // threads in a call now
  std::string last_error;
};

// Runs calls of a remote that may be slow, dead or hanging, each on a thread of
// its own. A late call is abandoned: its work learns that at its next Step and
// ends. Work owns all that it touches.
//
// There are two circuit breakers, for reading and for writing. A failure opens
// the breaker of its side, a late call both. While the one for reading is open,
// all calls are refused at once; while the one for writing is, those that write
// are. After the back-off, a call that comes starts a probe beside it, and the
// breaker for reading closes if the probe succeeds; the breaker for writing
// lets one call through. While an abandoned call is in its own step for less
// than the time-out, all calls are refused. Thread-safe. May be destroyed while
// abandoned calls run.
class RemoteCalls {
 public:
  enum class Side { kRead, kWrite };
  class Call;
  // Throws a std::exception if it fails.
  using Work = std::function<void(Call&)>;

  RemoteCalls(const RemoteCallOptions& options, Work probe);

  // Runs `work`. Returns whether it ended without throwing and within the
  // time-out, which is for all of it for reading, and for each of its steps for
  // writing.
  bool Run(Side side, Work work);

  RemoteCallStats stats() const;

 private:
  struct State;
  static void Launch(const std::shared_ptr<State>& state,
                     const std::shared_ptr<Call>& call, Work work);

  std::shared_ptr<State> state_;
};

// A call, as its work sees it.
class RemoteCalls::Call {
 public:
  // The work calls this before each thing that may hang. Returns false if
  // nobody waits any more: the work should end.
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
