#ifndef GEMMAKV_STORE_FOLDER_SWEEP_H_
#define GEMMAKV_STORE_FOLDER_SWEEP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "store/folder.h"

// What is in a folder, and what goes where that is too much. Names and times
// tell, no file is read.

namespace gkv {

struct FolderEntry {
  FileName name;
  uint64_t bytes = 0;
  int64_t used_ns = 0;  // when it was last used or written; never ahead of now
  int64_t ahead_ns = 0;  // by how much it was, by a clock that was put back
};

struct FolderContent {
  std::vector<FolderEntry> entries;
  std::vector<std::string> temporary;  // paths relative to the folder
  uint64_t bytes = 0;                  // of the entries

  uint64_t CountedBytes() const;  // what a budget counts: whole memory pages
};

// What a file of so many bytes takes.
uint64_t CountedBytes(uint64_t bytes);

// Whatever is called otherwise, or is no regular file, is not part of it.
// Throws std::bad_alloc.
FolderContent ReadFolder(const Folder& folder);

struct SweepResult {
  bool swept = false;  // false: another one is at it
  uint64_t removed = 0;
  uint64_t removed_bytes = 0;
  uint64_t removed_temporary = 0;
  uint64_t entries = 0;  // that are left
  uint64_t bytes = 0;
};

// Removes temporary files of dead writers, objects whose parent is missing,
// and, where all that is left is more than 90 % of `budget_bytes`, the least
// recently used down to that: nothing before what hangs on it. `pinned_bytes`
// count as well and cannot be freed. The budget is at most what there is and
// what is free besides the reserve. Throws std::bad_alloc.
SweepResult SweepFolder(const Folder& folder, uint64_t budget_bytes,
                        uint64_t pinned_bytes);

// `reserved_bytes`: what folders leave free for others, a 32nd of the file
// system, at most 256 MiB.
struct FileSystemRoom {
  uint64_t free_bytes = 0;
  uint64_t reserved_bytes = 0;
};
// Of a file system without a size, or one that does not say, all is free.
FileSystemRoom RoomOf(const Folder& folder) noexcept;

// Removes all objects of a salt; a null pointer: all. Those that others hang on
// go last. Throws std::bad_alloc.
[[nodiscard]] bool ClearFolder(const Folder& folder, const Address* salt);

// Removes a branch, what others hang on last. Names tell what hangs on what;
// heads are read where the branch begins. Returns how many objects went. Throws
// std::bad_alloc.
uint64_t RemoveBranchOf(const Folder& folder, const ObjectBranch& branch);

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_SWEEP_H_
