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
  // What the files may take, written by any process.
  uint64_t budget_bytes = 0;
};

// A folder of objects, which processes share (docs/block-store-format.md).
//
// What it gives has been checked: its hashes are right and its address is the
// one that was asked for. Put writes at once; whoever waits for nobody calls it
// from a thread of its own.
class FolderStore : public BlockStore {
 public:
  // Of "shared" at most half of the file system and of the memory that this
  // process may use; else what was asked for.
  virtual uint64_t budget_bytes() const = 0;
  // Removes what is dead, orphaned or beyond the budget.
  virtual SweepResult Sweep() = 0;
};

// Makes the folder where it is missing. Throws InvalidArgument for options, or
// a path, that cannot be used: a file, a symbolic link, a folder that is
// another user's, is open to others or holds other things, or is not in memory
// though it has to be; IoError.
std::shared_ptr<FolderStore> OpenFolderStore(const std::string& path,
                                             const FolderOptions& options);

// What is in a folder, for people.
struct FolderReport {
  struct Group {
    std::array<uint8_t, 8> salt{};  // how its digest begins
    ObjectKind kind = ObjectKind::kPage;
    uint64_t entries = 0;
    uint64_t bytes = 0;
  };
  std::string file_system;
  std::vector<Group> groups;  // by salt, kind
  uint64_t temporary_files = 0;
  int64_t oldest_ns = 0;  // last uses, since 1970; 0 where there are no entries
  int64_t newest_ns = 0;
};
// Makes nothing. Throws as OpenFolderStore does, and InvalidArgument for a
// folder that is none of these.
FolderReport DescribeFolder(const std::string& path);

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_STORE_H_
