#ifndef GEMMAKV_BASE_PROCESSORS_H_
#define GEMMAKV_BASE_PROCESSORS_H_

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/own_process.h"
#include "gemmakv/threads.h"

namespace gkv {

// The folder in which the system describes its processors.
inline constexpr const char* kProcessorsFolder = "/sys/devices/system/cpu";

// Returns the ids of the processors that the calling thread may use, ascending:
// its affinity mask, which control groups limit, too. While a ScopedPin holds
// the thread, it is the mask from before. Empty if the system does not say.
std::vector<int> AllowedProcessors();

// Returns the processors with their cores and nodes, as the folder has them. A
// processor that the folder says nothing of is a core of its own, of node 0.
std::vector<Processor> DescribeProcessors(
    std::span<const int> ids, const std::string& folder = kProcessorsFolder);

// Returns the processors in the order in which threads are placed: one on each
// core, node after node, then a second one on each core that has two
// processors, and so on.
std::vector<Processor> PlacementOrder(std::vector<Processor> processors);

// The processors that the threads of a model are pinned to, for as long as this
// object lives. Processors that other models of this process have are taken
// last, so a second model gets processors of its own while there are some.
class PinnedProcessors {
 public:
  // `order` is that of PlacementOrder(). Throws InvalidArgument if there are
  // fewer processors than threads.
  PinnedProcessors(size_t threads, std::vector<Processor> order);
  ~PinnedProcessors();
  PinnedProcessors(const PinnedProcessors&) = delete;

  // Returns one for each thread. There are none in a child of fork(), since the
  // parent computes on them.
  std::span<const Processor> processors() const;

 private:
  std::vector<Processor> processors_;
  const OwnProcess process_;
};

// Confines a thread to one processor. Returns 0, or the errno value with which
// the system refused.
int PinThread(pthread_t thread, int processor);
// Returns the error to throw for such an errno value.
IoError PinError(int processor, int error);

// Confines the calling thread to one processor until the end of its scope. Pins
// may be nested.
class ScopedPin {
 public:
  // Throws IoError if the system refuses.
  explicit ScopedPin(int processor);
  ~ScopedPin();
  ScopedPin(const ScopedPin&) = delete;

 private:
  std::vector<int> before_;
  bool outermost_ = false;
};

// Pins the calling thread to the first of a pool's processors. Returns null if
// there are none.
inline std::unique_ptr<ScopedPin> PinTo(
    std::span<const Processor> processors) {
  if (processors.empty()) return nullptr;
  return std::make_unique<ScopedPin>(processors.front().id);
}

// Returns the processors that the calling thread could use if no ScopedPin held
// it; empty if none does.
std::vector<int> ProcessorsWithoutPin();

// Lets the calling thread run on these processors alone; an empty list changes
// nothing. Returns whether the system agreed.
bool RunOn(std::span<const int> processors);

// Wraps `fn` as the function of a thread that the calling thread starts. A
// thread inherits the pin of the one that starts it; the new thread is not to
// share that processor.
template <typename Fn>
auto Unpinned(Fn fn) {
  return [fn = std::move(fn), allowed = ProcessorsWithoutPin()]() mutable {
    (void)RunOn(allowed);
    fn();
  };
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_PROCESSORS_H_
