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

// Where the system says what processors there are.
inline constexpr const char* kProcessorsFolder = "/sys/devices/system/cpu";

// Ids of the processors that the calling thread may use (its affinity mask,
// which control groups bound, too; where a ScopedPin holds it, that of before),
// ascending. Empty if the system does not say.
std::vector<int> AllowedProcessors();

// Their cores and nodes, as the folder tells. A processor that it says nothing
// of is a core of its own, of node 0.
std::vector<Processor> DescribeProcessors(
    std::span<const int> ids, const std::string& folder = kProcessorsFolder);

// In the order in which threads are placed: one on each core, node after node,
// then a second one on each core that has two processors, and so on.
std::vector<Processor> PlacementOrder(std::vector<Processor> processors);

// Processors that threads of a model are pinned to, as long as this lives. What
// others of this process have is taken last: a second model gets processors of
// its own while there are some.
class PinnedProcessors {
 public:
  // `order`: of placement, see above. Throws InvalidArgument where there are
  // fewer processors than threads.
  PinnedProcessors(size_t threads, std::vector<Processor> order);
  ~PinnedProcessors();
  PinnedProcessors(const PinnedProcessors&) = delete;

  // One for each thread. None in a child of fork(): the parent computes on
  // them.
  std::span<const Processor> processors() const;

 private:
  std::vector<Processor> processors_;
  const OwnProcess process_;
};

// Confines a thread to one processor; 0, or what the system refused it with.
int PinThread(pthread_t thread, int processor);
// What is thrown where it refused.
IoError PinError(int processor, int error);

// Confines the calling thread to one processor until the end of its scope. They
// nest.
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

// On the first of a pool's processors; null where there are none.
inline std::unique_ptr<ScopedPin> PinTo(
    std::span<const Processor> processors) {
  if (processors.empty()) return nullptr;
  return std::make_unique<ScopedPin>(processors.front().id);
}

// Where the calling thread would be allowed to run if no ScopedPin held it;
// empty if none does.
std::vector<int> ProcessorsBehindPin();

// Lets the calling thread run on these alone; empty: nothing changes. Whether
// the system agreed.
bool RunOn(std::span<const int> processors);

// `fn` as the function of a thread that the calling one starts: threads inherit
// what theirs is pinned to, and this one is not to share a processor with it.
template <typename Fn>
auto Unpinned(Fn fn) {
  return [fn = std::move(fn), allowed = ProcessorsBehindPin()]() mutable {
    (void)RunOn(allowed);
    fn();
  };
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_PROCESSORS_H_
