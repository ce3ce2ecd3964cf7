#include "base/process.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/error.h"

namespace gkv {
namespace {

// Returns whether a list as "cpu,cpuacct" has a name.
bool Lists(std::string_view list, std::string_view name) {
  while (true) {
    const size_t end = list.find(',');
    if (list.substr(0, end) == name) return true;
    if (end == std::string_view::npos) return false;
    list.remove_prefix(end + 1);
  }
}

// Returns the path of this process's group, "/a/b"; empty if it has none. The
// lines of `own` are "4:memory:/a/b", of version 2 "0::/a/b".
std::string GroupPath(const std::string& own, std::string_view controller) {
  std::ifstream file(own);
  for (std::string line; std::getline(file, line);) {
    const size_t name = line.find(':') + 1;
    const size_t path = line.find(':', name) + 1;
    if (name == 0 || path == 0 || path >= line.size()) continue;
    const std::string_view listed(&line[name], path - 1 - name);
    if (controller.empty() ? line.starts_with("0::")
                           : Lists(listed, controller)) {
      return line.substr(path);
    }
  }
  return {};
}

}  // namespace

uint32_t UserId() noexcept { return geteuid(); }

std::vector<std::string> ControlGroupFolders(const ControlGroups& groups,
                                             std::string_view controller) {
  std::string folder = groups.root;
  if (!controller.empty()) folder += StrCat('/', controller);
  std::vector<std::string> folders = {folder};
  const std::string path = GroupPath(groups.own, controller);
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    begin = end + 1;
    if (part.empty()) continue;
    if (part == "..") break;  // beyond what this process can see
    folder += StrCat('/', part);
    folders.push_back(folder);
  }
  return folders;
}

uint64_t MemoryLimit(const ControlGroups& groups) {
  uint64_t limit = static_cast<uint64_t>(PageBytes()) *
                   static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  const auto lower = [&](const char* controller, const char* name) {
    for (const std::string& folder : ControlGroupFolders(groups, controller)) {
      uint64_t found = 0;  // it may also say "max"
      if (std::ifstream(StrCat(folder, '/', name)) >> found) {
        limit = std::min(limit, found);
      }
    }
  };
  lower("", "memory.max");
  lower("memory", "memory.limit_in_bytes");
  return limit;
}

size_t ProcessorCacheBytes(int level) noexcept {
  const int name = level == 1   ? _SC_LEVEL1_DCACHE_SIZE
                   : level == 2 ? _SC_LEVEL2_CACHE_SIZE
                                : _SC_LEVEL3_CACHE_SIZE;
  return static_cast<size_t>(std::max(0L, sysconf(name)));
}

size_t PageBytes() noexcept {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace gkv
