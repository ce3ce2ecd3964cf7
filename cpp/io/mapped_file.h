#ifndef GEMMAKV_IO_MAPPED_FILE_H_
#define GEMMAKV_IO_MAPPED_FILE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/hash.h"
#include "io/file.h"

namespace gkv {

// A read-only mapping of a regular file. All processes that map it share its
// pages. Move-only. The file must not be truncated while it is mapped: touching
// bytes that are gone ends the process. Unlinking or renaming it does no harm.
class MappedFile {
 public:
  // Throws IoError if `path` is missing, is not a regular file or cannot be
  // read, and CorruptFile if it is empty.
  explicit MappedFile(const std::string& path);

  const std::string& path() const { return path_; }
  std::span<const uint8_t> bytes() const { return mapping_.bytes(); }
  // The user id of the file's owner when it was opened.
  uint32_t owner() const { return owner_; }

  // A hash of device, inode, size and times when the file was opened. If it is
  // another one later, the path leads to another file, or the file was written
  // to.
  const Hash128& identity() const { return identity_; }
  // Whether the path still leads to this file, even if it was written to.
  bool IsInPlace() const;
  // Whether no byte can change from now on without another identity. Returns
  // false if that cannot be known: the file was written to a moment ago, or it
  // is on a file system that does not note writes through mappings, or whose
  // times come from another machine. Waits until the disk has the content.
  // Tests ask what it would say `later`.
  bool Settle(std::chrono::seconds later = {}) const;

  // Reads [offset, offset + size) into memory, faster than touching the pages
  // one by one does. Returns false if they cannot be read: the file has been
  // truncated, or the disk fails.
  bool Populate(size_t offset, size_t size) const;
  // Gives whole pages inside [offset, offset + size) back to the operating
  // system: they leave this process's resident memory and are read again from
  // the file if touched later.
  void DropPages(size_t offset, size_t size) const;

 private:
  std::string path_;
  Mapping mapping_;
  uint32_t owner_ = 0;
  Hash128 identity_;
  Hash128 place_;  // a hash of device and inode
};

// Hints about bytes of a mapping, harmless for other memory.
//
// Says that the bytes are read in no order, so that a page is read without
// those around it.
void ExpectScatteredReads(const uint8_t* data, size_t size);
// Says that the bytes will be read from end to end, again and again. Large
// pages, where the system has them, spare the processor looking up small ones.
void PreferLargePages(const uint8_t* data, size_t size);
// Says that the bytes will be read soon: the system begins to read them. Does
// not wait.
void PrefetchPages(const uint8_t* data, size_t size);

}  // namespace gkv

#endif  // GEMMAKV_IO_MAPPED_FILE_H_
