#ifndef GEMMAKV_IO_PART_FILE_H_
#define GEMMAKV_IO_PART_FILE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "io/file.h"

namespace gkv {

// A file in the making. It appears under its final name whole or not at all,
// read-only and for its owner alone (what it was made from may be private), and
// is gone if it is destroyed before. There are two kinds:
//
// - Create: one large file, which processes make in turn. It is written as
//   `<final path>.part`, whose lock is that of the turn: over all processes one
//   PartFile of a final path exists at a time. The system drops the lock when
//   the holder dies, and the next one overwrites what a killed holder left. It
//   replaces what has the final name.
// - CreateIn: one of many small files, which anybody may make at any time. It
//   has no name while it is written, or, where the file system has no such
//   files, a random one, and is locked then: where the lock is to be had, its
//   writer is dead. It replaces nothing.
//
// Move-only.
class PartFile {
 public:
  // Makes missing folders. While another process or thread holds the part file,
  // waits for at most `patience`, calling `poll` now and then, which may throw
  // to give up; nullopt if the wait was in vain. Throws IoError (no permission,
  // read-only file system, no locks there, ...).
  static std::optional<PartFile> Create(const std::string& final_path,
                                        std::chrono::milliseconds patience,
                                        const std::function<void()>& poll = {});
  // In a folder, which must outlive it. `prefix` begins a random name; it has
  // one if `named` is true or files without names cannot be made. Throws
  // IoError.
  static PartFile CreateIn(const Directory& folder, std::string name,
                           std::string_view prefix, bool named);
  // Deletes the part file if it was not published.
  ~PartFile();
  PartFile(PartFile&&) noexcept = default;
  PartFile& operator=(PartFile&&) = delete;

  // Whether it has a name while it is written.
  bool is_named() const { return !part_name_.empty(); }
  // Sets the size and reserves the space; nothing of a killed writer's content
  // stays. Throws IoError if the disk is full, or the size is beyond what this
  // process may write.
  void Reserve(uint64_t size);
  // 0, or the errno value of what failed. Thread-safe.
  [[nodiscard]] int WriteAt(uint64_t offset,
                            std::span<const uint8_t> bytes) const noexcept {
    return file_.WriteAt(offset, bytes);
  }
  // Gives the file its final name; with `durable`, when the disk has the
  // content. Throws IoError, with EEXIST where something has the name that is
  // not to be replaced.
  void Publish(bool durable = true);

 private:
  PartFile(const Directory& folder, File file, std::string final_name,
           std::string part_name, bool replaces);

  const Directory* folder_;  // that the names are relative to
  File file_;
  std::string final_name_;
  std::string part_name_;  // empty: it has none
  bool replaces_;
  bool published_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_PART_FILE_H_
