#ifndef GEMMAKV_THREADS_H_
#define GEMMAKV_THREADS_H_

#include <cstddef>
#include <vector>

namespace gkv {

// A processor as the system schedules on it; a core has one or several.
struct Processor {
  int id = 0;
  int core = 0;  // the lowest id of its core's processors
  int node = 0;  // NUMA node

  bool operator==(const Processor&) const = default;
};

// The processors of a model's threads.
struct ThreadPlacement {
  size_t threads = 1;
  // Each thread stays on its processor; otherwise the system moves them.
  bool pinned = false;
  // Pinned: the processor of each thread, in the order of threads. Otherwise
  // all that the calling thread may use, by ids.
  std::vector<Processor> processors;
};

}  // namespace gkv

#endif  // GEMMAKV_THREADS_H_
