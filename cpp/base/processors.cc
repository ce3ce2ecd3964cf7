#include "base/processors.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <system_error>
#include <tuple>

#include "base/error.h"
#include "base/mutex.h"

namespace gkv {
namespace {

// A set of processors with ids below `count`. It may be larger than the
// cpu_set_t of the C library.
class ProcessorSet {
 public:
  explicit ProcessorSet(size_t count)
      : count_(count), bytes_(CPU_ALLOC_SIZE(count)), set_(CPU_ALLOC(count)) {
    if (set_ == nullptr) throw std::bad_alloc();
    CPU_ZERO_S(bytes_, set_);
  }
  ~ProcessorSet() { CPU_FREE(set_); }
  ProcessorSet(const ProcessorSet&) = delete;

  cpu_set_t* get() { return set_; }
  size_t bytes() const { return bytes_; }
  void Add(int id) { CPU_SET_S(static_cast<size_t>(id), bytes_, set_); }
  std::vector<int> Ids() const {
    std::vector<int> ids;
    for (size_t id = 0; id < count_; ++id) {
      if (CPU_ISSET_S(id, bytes_, set_)) ids.push_back(static_cast<int>(id));
    }
    return ids;
  }

 private:
  const size_t count_;
  const size_t bytes_;
  cpu_set_t* const set_;
};

constexpr size_t kMostProcessors = size_t{1} << 16;

// Returns the first number of a list as the system writes it, "4,12-13", or
// `fallback` if there is none.
int FirstOf(const std::string& path, int fallback) {
  std::ifstream file(path);
  int id = 0;
  return file >> id && id >= 0 ? id : fallback;
}

// Returns the node of the processor with this folder. A link there, such as
// "node1", says it; 0 if there is none.
int NodeOf(const std::string& folder) {
  DIR* const dir = opendir(folder.c_str());
  if (dir == nullptr) return 0;
  int node = -1;
  while (const dirent* const entry = readdir(dir)) {
    const char* const name = entry->d_name;
    if (std::strncmp(name, "node", 4) != 0 || name[4] < '0' || name[4] > '9') {
      continue;
    }
    node = std::atoi(name + 4);
  }
  closedir(dir);
  return std::max(node, 0);
}

// The number of threads that are pinned to each processor. Never destroyed,
// since models may outlive static objects.
struct Users {
  Mutex mutex{AtFork::kWaits};
  std::map<int, size_t> of GUARDED_BY(mutex);

  static Users& Get() {
    static Users& users = *new Users;
    return users;
  }
};

// Where this thread could run before its outermost ScopedPin; empty if none
// holds it.
thread_local std::vector<int> mask_before_pin;

std::vector<int> OwnMask() {
  for (size_t count = 1024; count <= kMostProcessors; count *= 4) {
    ProcessorSet set(count);
    if (sched_getaffinity(0, set.bytes(), set.get()) == 0) return set.Ids();
    if (errno != EINVAL) break;  // otherwise the set is too small
  }
  return {};
}

}  // namespace

std::vector<int> AllowedProcessors() {
  return mask_before_pin.empty() ? OwnMask() : mask_before_pin;
}

std::vector<Processor> DescribeProcessors(std::span<const int> ids,
                                          const std::string& folder) {
  std::vector<Processor> found;
  for (const int id : ids) {
    const std::string own = StrCat(folder, "/cpu", id);
    found.push_back(
        {id, FirstOf(own + "/topology/thread_siblings_list", id), NodeOf(own)});
  }
  return found;
}

std::vector<Processor> PlacementOrder(std::vector<Processor> processors) {
  std::sort(processors.begin(), processors.end(),
            [](const Processor& a, const Processor& b) { return a.id < b.id; });
  std::map<std::pair<int, int>, size_t> of_core;
  std::vector<std::tuple<size_t, int, int, Processor>> ranked;
  for (const Processor& p : processors) {
    ranked.emplace_back(of_core[{p.node, p.core}]++, p.node, p.id, p);
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a), std::get<2>(a)) <
           std::tie(std::get<0>(b), std::get<1>(b), std::get<2>(b));
  });
  std::vector<Processor> order;
  for (const auto& entry : ranked) order.push_back(std::get<3>(entry));
  return order;
}

PinnedProcessors::PinnedProcessors(size_t threads,
                                   std::vector<Processor> order) {
  if (threads > order.size()) {
    throw InvalidArgument(
        Unexpected("threads",
                   StrCat("at most ", order.size(),
                          ", the processors that this process may use"),
                   StrCat(threads, " with pin_threads")));
  }
  Users& users = Users::Get();
  const MutexLock lock(users.mutex);
  const auto has_fewer = [&](const Processor& a, const Processor& b)
      REQUIRES(users.mutex) { return users.of[a.id] < users.of[b.id]; };
  std::stable_sort(order.begin(), order.end(), has_fewer);
  order.resize(threads);
  processors_ = std::move(order);
  for (const Processor& p : processors_) ++users.of[p.id];
}

PinnedProcessors::~PinnedProcessors() {
  Users& users = Users::Get();
  const MutexLock lock(users.mutex);
  for (const Processor& p : processors_) --users.of[p.id];
}

std::span<const Processor> PinnedProcessors::processors() const {
  if (process_.InChild()) return {};
  return processors_;
}

int PinThread(pthread_t thread, int processor) {
  ProcessorSet set(static_cast<size_t>(processor) + 1);
  set.Add(processor);
  return pthread_setaffinity_np(thread, set.bytes(), set.get());
}

IoError PinError(int processor, int error) {
  return IoError(StrCat("pin_threads: processor ", processor, ": ",
                        std::generic_category().message(error)),
                 error, "");
}

ScopedPin::ScopedPin(int processor)
    : before_(OwnMask()), outermost_(mask_before_pin.empty()) {
  std::vector<int> mask = before_;
  const int refused = PinThread(pthread_self(), processor);
  if (refused != 0) throw PinError(processor, refused);
  if (outermost_) mask_before_pin.swap(mask);
}

ScopedPin::~ScopedPin() {
  // If the system has since taken all of them from the process, it has moved
  // the thread to others already.
  (void)RunOn(before_);
  if (outermost_) mask_before_pin.clear();
}

std::vector<int> ProcessorsWithoutPin() { return mask_before_pin; }

bool RunOn(std::span<const int> processors) {
  if (processors.empty()) return true;
  ProcessorSet set(static_cast<size_t>(*std::max_element(processors.begin(),
                                                         processors.end())) +
                   1);
  for (const int id : processors) set.Add(id);
  return sched_setaffinity(0, set.bytes(), set.get()) == 0;
}

}  // namespace gkv
