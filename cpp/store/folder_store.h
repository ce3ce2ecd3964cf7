#ifndef GEMMAKV_STORE_FOLDER_STORE_H_
#define GEMMAKV_STORE_FOLDER_STORE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/block_store.h"
#include "store/folder_sweep.h"

namespace gkv {

struct FolderOptions {
  // "shared": in memory, and refused elsewhere. "disk": anywhere.
  std::string tier = "disk";
  // Objects are the files' own mappings; only with "shared". Else they are read
  // into memory.
  bool mapped = false;
  // The most bytes that files of all processes may take.
  uint64_t budget_bytes = 0;
};

// A folder of objects, one file each, which processes share
// (docs/internals/block-store-format.md).
//
// Put writes a file at once; a caller that must not wait calls it from a thread
// of its own. Load opens the file of an object, checks its hashes and its
// address, and gives its content, as a copy or as a mapping; it removes a file
// that is not sound, and sets the time of last use about once a minute. A store
// that maps files checks each once as long as the file does not change, and its
// readers share the mapping. Sweep removes files of dead writers, objects whose
// parent is missing, and the least recently used objects down to 90 % of the
// budget. Put calls it after a sixteenth of the budget was written, and when
// the file system is full. After failed writes a store refuses writes for a
// while. Files appear whole (Folder::Publish), so processes lock the folder
// only to sweep it and to repair its key.
//
// If the folder is gone, Put makes it again; if its path leads to another
// folder, the store continues with that one. In the implementation mutex_
// guards what is known of the folder and its files, and the counts. No lock is
// held while a file system is called, except the one that keeps the sweeps of a
// process apart.
class FolderStore : public BlockStore {
 public:
  // The budget; for "shared" at most half of the file system and of the memory
  // that this process may use.
  virtual uint64_t budget_bytes() const = 0;
  // Removes files of dead writers, objects without their parents, and what
  // exceeds the budget.
  virtual SweepResult Sweep() = 0;
};

// Opens a folder, which it makes if it is missing. Throws InvalidArgument for
// options or a path that cannot be used: a file, a symbolic link, a folder that
// is another user's, is open to others or holds other things, or is not in
// memory though it has to be; IoError.
std::shared_ptr<FolderStore> OpenFolderStore(const std::string& path,
                                             const FolderOptions& options);

// A summary of a folder's content, for people.
struct FolderReport {
  struct Group {
    std::array<uint8_t, 8> salt{};  // the beginning of its digest
    ObjectKind kind = ObjectKind::kPage;
    uint64_t entries = 0;
    uint64_t bytes = 0;
  };
  std::string file_system;
  std::vector<Group> groups;  // by salt, kind
  uint64_t temporary_files = 0;
  int64_t oldest_ns = 0;  // last uses, since 1970; 0 without entries
  int64_t newest_ns = 0;
};
// Makes nothing. Throws as OpenFolderStore does, and InvalidArgument for a
// folder that is not one of these.
FolderReport DescribeFolder(const std::string& path);

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_STORE_H_
