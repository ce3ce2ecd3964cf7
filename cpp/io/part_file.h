#ifndef GEMMAKV_IO_PART_FILE_H_
#define GEMMAKV_IO_PART_FILE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "io/descriptor.h"

namespace gkv {

// A file in the making: it is written as `<final path>.part`, and appears under
// its final path whole or not at all. Over all processes one PartFile of a
// final path exists at a time: the file beside is the lock too, which the
// system drops when the holder dies, and the next one overwrites what a killed
// holder left. Move-only.
class PartFile {
 public:
  // Makes missing folders. While another process or thread holds the part file,
  // waits for at most `patience`, calling `poll` now and then, which may throw
  // to give up; nullopt if the wait was in vain. Throws IoError (no permission,
  // read-only file system, no locks there, ...).
  static std::optional<PartFile> Create(const std::string& final_path,
                                        std::chrono::milliseconds patience,
                                        const std::function<void()>& poll = {});
  // Deletes the part file if it was not published.
  ~PartFile();
  PartFile(PartFile&&) noexcept = default;
  PartFile& operator=(PartFile&&) = delete;

  // Sets the size and reserves the space. Throws IoError if the disk is full,
  // or the size is beyond what this process may write.
  void Reserve(uint64_t size);
  // 0, or the errno value of what failed. Thread-safe.
  [[nodiscard]] int WriteAt(uint64_t offset,
                            std::span<const uint8_t> bytes) const noexcept;
  // Forces the content to the disk, makes the file read-only (for its owner
  // alone: what it was made from may be private) and gives it its final name,
  // replacing what has it. Throws IoError.
  void Publish();

 private:
  PartFile(Descriptor file, std::string final_path);

  Descriptor file_;
  std::string final_path_;
  std::string part_path_;
  bool published_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_PART_FILE_H_
