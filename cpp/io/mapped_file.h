#ifndef GEMMAKV_IO_MAPPED_FILE_H_
#define GEMMAKV_IO_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace gkv {

// Read-only mapping of a regular file; all processes that map it share its
// pages. Move-only. The file must not be truncated while it is mapped: touching
// bytes that are gone ends the process. Unlinking or renaming it does no harm.
class MappedFile {
 public:
  // Throws IoError if `path` is missing, is not a regular file or cannot be
  // read, and CorruptFile if it is empty.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;

  const std::string& path() const { return path_; }
  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  // User id of the file's owner when it was opened.
  uint32_t owner() const { return owner_; }

  // Gives whole pages inside [offset, offset + size) back to the operating
  // system: they leave this process's resident memory and are read again from
  // the file if touched later.
  void DropPages(size_t offset, size_t size) const;

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  uint32_t owner_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_MAPPED_FILE_H_
