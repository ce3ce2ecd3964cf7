#ifndef GEMMAKV_BASE_PROCESS_H_
#define GEMMAKV_BASE_PROCESS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Facts about this process and its machine, as the system tells them.

namespace gkv {

// Returns the id of the user whose rights this process has.
uint32_t UserId() noexcept;

// Where the system tells of control groups. Tests have folders of their own.
struct ControlGroups {
  std::string root = "/sys/fs/cgroup";    // their folders, by name
  std::string own = "/proc/self/cgroup";  // which of them hold this process
};

// Returns the folders of the groups that hold this process, each one inside the
// one before it. An empty `controller` means groups of version 2; another one,
// as "memory", those of version 1 that have it. A process in a container often
// sees its own group at the root, under a path that is not there: folders need
// not exist.
std::vector<std::string> ControlGroupFolders(const ControlGroups& groups,
                                             std::string_view controller);

// Returns the bytes of memory that this process may use: those of the machine,
// or the lowest limit of the control groups that hold it, if that is lower.
uint64_t MemoryLimit(const ControlGroups& groups = {});

// Returns the bytes of the data cache of `level` 1, 2 or 3 that a core has or
// shares; 0 if the system does not say.
size_t ProcessorCacheBytes(int level) noexcept;

// Returns the bytes of a page of memory.
size_t PageBytes() noexcept;

}  // namespace gkv

#endif  // GEMMAKV_BASE_PROCESS_H_
