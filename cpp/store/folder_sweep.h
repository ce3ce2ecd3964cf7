#ifndef GEMMAKV_STORE_FOLDER_SWEEP_H_
#define GEMMAKV_STORE_FOLDER_SWEEP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "store/folder.h"

// The content of a folder, and what is removed if it is too much. Names and
// times tell; no file is read.

namespace gkv {

struct FolderEntry {
  FileName name;
  uint64_t bytes = 0;
  int64_t used_ns = 0;  // last use or write; never later than now
  int64_t ahead_ns = 0;  // by how much it was later: a clock was set back
};

struct FolderContent {
  std::vector<FolderEntry> entries;
  std::vector<std::string> temporary;  // relative paths
  uint64_t bytes = 0;                  // of the entries

  uint64_t CountedBytes() const;  // as a budget counts: whole memory pages
};

// Returns the memory of a file of so many bytes.
uint64_t CountedBytes(uint64_t bytes);

// Reads the content of a folder. Files with other names, and what is no regular
// file, are left out. Throws std::bad_alloc.
FolderContent ReadFolder(const Folder& folder);

struct SweepResult {
  bool swept = false;  // false: another process sweeps
  uint64_t removed = 0;
  uint64_t removed_bytes = 0;
  uint64_t removed_temporary = 0;
  uint64_t entries = 0;  // that are left
  uint64_t bytes = 0;
};

// Removes temporary files of dead writers and objects whose parent is missing.
// If the rest takes more than 90 % of `budget_bytes`, removes the least
// recently used objects down to that, but none before the objects that hang on
// it. `pinned_bytes` count as well and cannot be freed. The budget is at most
// what there is plus what is free beyond the reserve. Throws std::bad_alloc.
SweepResult SweepFolder(const Folder& folder, uint64_t budget_bytes,
                        uint64_t pinned_bytes);

// `reserved_bytes`: what stores leave free for others, a 32nd of the file
// system, at most 256 MiB.
struct FileSystemRoom {
  uint64_t free_bytes = 0;
  uint64_t reserved_bytes = 0;
};
// In a file system without a known size, everything is free.
FileSystemRoom RoomOf(const Folder& folder) noexcept;

// Removes all objects of a salt, or with a null pointer all; an object after
// those that hang on it. Throws std::bad_alloc.
[[nodiscard]] bool ClearFolder(const Folder& folder, const Address* salt);

// Removes a branch, an object after those that hang on it. Names tell what
// hangs on what; heads are read at the beginning of the branch. Returns the
// number of objects that were removed. Throws std::bad_alloc.
uint64_t RemoveBranchOf(const Folder& folder, const ObjectBranch& branch);

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_SWEEP_H_
