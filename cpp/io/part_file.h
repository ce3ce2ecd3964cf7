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

// A file in the making. Publish() gives it its final name, under which it
// appears whole or not at all, read-only and for its owner alone (what it was
// made from may be private). If the object is destroyed before, the file is
// gone. There are two kinds:
//
// - Create() makes one large file, which processes make in turn. It is written
//   as `<final path>.part`, and a process has its turn while it holds the lock
//   of that: of all processes, only one at a time has a PartFile for a final
//   path. The system drops the lock when its holder dies, and the next one
//   overwrites what a killed holder left. The file replaces what has the final
//   name.
// - CreateIn() makes one of many small files, which anybody may make at any
//   time. It has no name while it is written. On a file system that has no
//   files without names it has a random name and is locked: if somebody else
//   can lock it, its writer is dead. The file replaces nothing.
//
// Move-only.
class PartFile {
 public:
  // Makes missing folders. While another process or thread holds the part file,
  // waits for at most `patience` and calls `poll` now and then, which may throw
  // to give up. Returns nullopt if the wait was in vain. Throws IoError (no
  // permission, read-only file system, no locks there, ...).
  static std::optional<PartFile> Create(const std::string& final_path,
                                        std::chrono::milliseconds patience,
                                        const std::function<void()>& poll = {});
  // `folder` must outlive the result. The file has a random name that begins
  // with `prefix` if `named` is true or files without names cannot be made.
  // Throws IoError.
  static PartFile CreateIn(const Directory& folder, std::string name,
                           std::string_view prefix, bool named);
  // Deletes the part file if it was not published.
  ~PartFile();
  PartFile(PartFile&&) noexcept = default;
  PartFile& operator=(PartFile&&) = delete;

  // Whether the file has a name while it is written.
  bool is_named() const { return !part_name_.empty(); }
  // Sets the size and reserves the space. Nothing stays of what a killed writer
  // wrote. Throws IoError if the disk is full, or if the size is beyond what
  // this process may write.
  void Reserve(uint64_t size);
  // Returns 0, or the errno value of what failed. Thread-safe.
  [[nodiscard]] int WriteAt(uint64_t offset,
                            std::span<const uint8_t> bytes) const noexcept {
    return file_.WriteAt(offset, bytes);
  }
  // Gives the file its final name; with `durable`, after the disk has the
  // content. Throws IoError, with EEXIST if something has the name that the
  // file is not to replace.
  void Publish(bool durable = true);

 private:
  PartFile(const Directory& folder, File file, std::string final_name,
           std::string part_name, bool replaces);

  const Directory* folder_;  // the names are relative to it
  File file_;
  std::string final_name_;
  std::string part_name_;  // empty: it has none
  bool replaces_;
  bool published_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_PART_FILE_H_
