#ifndef GEMMAKV_IO_FILE_H_
#define GEMMAKV_IO_FILE_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

// All that the core asks of file systems. This header opens, reads, writes,
// maps, locks, lists and removes files and says what they are; part_file.h
// makes a file that appears whole; mapped_file.h is a whole file in memory. The
// sources of these have all calls of the system that it takes: other layers
// include no header of the system (tools/check_sources.py), and another system
// needs these sources again and nothing else.
//
// A File is an open file, and a Directory is an open folder. The names that a
// Directory takes are relative to it, wherever the path leads by now that it
// was opened by. Nothing here throws but for lack of memory: a result says what
// failed, as an errno value where it is a number (0: nothing), else by errno.
// No call stops for a signal, waits for the other end of a named pipe, or
// follows a symbolic link at the end of a name unless `follow` is true.

namespace gkv {

// What the system says of a file at one moment.
struct FileInfo {
  enum class Kind { kRegular, kFolder, kLink, kOther };

  Kind kind = Kind::kOther;
  uint32_t mode = 0;    // who may do what, as chmod takes it
  uint32_t owner = 0;   // user id
  uint64_t device = 0;  // the two tell files apart
  uint64_t inode = 0;
  uint64_t links = 0;  // names that it has
  uint64_t size = 0;
  int64_t used_ns = 0;  // nanoseconds since 1970
  int64_t written_ns = 0;
  int64_t changed_ns = 0;  // written, or renamed, linked, ...

  bool IsSameFile(const FileInfo& other) const {
    return device == other.device && inode == other.inode;
  }
  // Whether it is the same file with the same content. Not so where two writes
  // meet in one tick of the clock. Being used, renamed or unlinked changes
  // nothing.
  bool HasSameContent(const FileInfo& other) const {
    return IsSameFile(other) && size == other.size &&
           written_ns == other.written_ns;
  }
};

// A file system, as an open file on it tells.
struct FileSystem {
  // As the kernel calls it: "tmpfs", "ext4", ...; the number of an unknown one.
  std::string name;
  bool is_in_memory = false;
  // Whether the first write through a mapping to a page that the disk has sets
  // the file's times, and these come from this machine's clock.
  bool notes_every_write = false;
  uint64_t bytes = 0;       // 0: it has no size, or does not say
  uint64_t free_bytes = 0;  // that this user may write
};

enum class LockResult { kHeld, kTaken, kImpossible };

// Bytes of a file in memory, read-only, until this is destroyed. Move-only.
class Mapping {
 public:
  std::span<const uint8_t> bytes() const {
    return {data_.get(), data_ ? data_.get_deleter().size : 0};
  }

 private:
  friend class File;
  struct Unmap {
    void operator()(const uint8_t* data) const noexcept;
    size_t size;
  };
  std::unique_ptr<const uint8_t[], Unmap> data_;
};

// An open file of the system, closed on destruction. Move-only. Thread-safe.
class File {
 public:
  // Takes over `descriptor`; a negative one is none.
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File();
  File(File&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

  std::optional<FileInfo> Info() const noexcept;
  FileSystem OnWhat() const;

  // Reads all of `bytes`; EIO if the file ends before.
  [[nodiscard]] int ReadAt(uint64_t offset,
                           std::span<uint8_t> bytes) const noexcept;
  [[nodiscard]] int WriteAt(uint64_t offset,
                            std::span<const uint8_t> bytes) const noexcept;
  // Empties it, then sets its size and reserves the space, where space can be
  // reserved; elsewhere writing reports a full disk.
  [[nodiscard]] int Reserve(uint64_t size) const noexcept;
  // Returns when the disk has the content. Some file systems report a full
  // disk, or a write that failed, only here.
  [[nodiscard]] int Sync() const noexcept;
  // Takes all rights but the owner's to read.
  [[nodiscard]] int MakeReadOnly() const noexcept;
  // Says when it was used last.
  int SetUsed(int64_t used_ns) const noexcept;
  // The first `size` bytes, which it must have; empty if they cannot be mapped.
  Mapping Map(size_t size) const noexcept;

  // Both lock the open file without waiting, until its last descriptor is
  // closed, as it is when a process dies. They know nothing of each other; each
  // is the one that processes of other versions take: the first in a folder of
  // objects (docs/block-store-format.md), the second for a part file.
  LockResult TryLock(bool exclusive) const noexcept;
  LockResult TryFlock() const noexcept;

 private:
  int descriptor_;
};

// An open folder.
class Directory : public File {
 public:
  using File::File;

  // Where relative paths begin: names are paths. It is not open.
  static const Directory& Working();

  Directory OpenDirectory(const std::string& name, bool follow = false) const;
  File OpenToRead(const std::string& name, bool follow = false) const;
  // The same; its times stay, where the system allows that.
  File OpenUnnoticed(const std::string& name) const;
  // Makes it where it is missing, for this user alone.
  File OpenToWrite(const std::string& name) const;
  // A new file for this user to read, open to be written: without a name, or
  // with one that nothing has.
  File MakeUnnamed() const;
  File MakeNamed(const std::string& name) const;
  // EEXIST if something has the name. For this user alone.
  [[nodiscard]] int MakeDirectory(const std::string& name) const noexcept;

  // Gives an unnamed file a name that nothing has: EEXIST.
  [[nodiscard]] int Link(const File& unnamed,
                         const std::string& name) const noexcept;
  // Gives a file another name, which nothing has (EEXIST) unless `replace`.
  [[nodiscard]] int Rename(const std::string& from, const std::string& to,
                           bool replace) const noexcept;
  // Removes what is no folder.
  int Remove(const std::string& name) const noexcept;

  std::optional<FileInfo> InfoOf(const std::string& name,
                                 bool follow = false) const noexcept;
  // Says when a file was used and written last.
  int SetTimes(const std::string& name, int64_t time_ns) const noexcept;
  // Calls `visit` with each regular file. Throws what `visit` throws.
  void VisitFiles(
      const std::function<void(std::string_view, const FileInfo&)>& visit)
      const;
};

// Whether this user may make and remove files in a folder.
bool MayChangeFolder(const std::string& path) noexcept;

// Whether a file may become so large: writing beyond this process's limit would
// be a signal, not an error.
[[nodiscard]] bool MayBeWritten(uint64_t size) noexcept;

// Makes `call` of the system again for as long as a signal interrupts it.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace gkv

#endif  // GEMMAKV_IO_FILE_H_
