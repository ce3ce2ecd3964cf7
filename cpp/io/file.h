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

// The file layer: all that the core asks of file systems. This header opens,
// reads, writes, maps, locks, lists and removes files and says what they are;
// part_file.h makes a file that appears whole; mapped_file.h is a whole file in
// memory. The sources of these three make all system calls that this takes.
// Outside of cpp/io and a few files of cpp/base nothing includes headers of the
// system (tools/check_sources.py), so another system needs other sources here,
// and the callers stay as they are.
//
// A File is an open file, and a Directory is an open folder. The names that a
// Directory takes are relative to that folder, even if the path that opened it
// leads elsewhere by now. Nothing here throws except for lack of memory, or
// what a caller's own function throws. A result that is a number is an errno
// value, or 0 if nothing failed; after any other result that says so, such as a
// File that is not open, errno has the value. No call stops for a signal, waits
// for the other end of a named pipe, or follows a symbolic link at the end of a
// name unless `follow` is true.

namespace gkv {

// The state of a file at one moment, as the system tells it.
struct FileInfo {
  enum class Kind { kRegular, kFolder, kLink, kOther };

  Kind kind = Kind::kOther;
  uint32_t mode = 0;    // who may do what, as chmod takes it
  uint32_t owner = 0;   // user id
  uint64_t device = 0;  // the two tell files apart
  uint64_t inode = 0;
  uint64_t links = 0;  // the number of its names
  uint64_t size = 0;
  int64_t used_ns = 0;  // nanoseconds since 1970
  int64_t written_ns = 0;
  int64_t changed_ns = 0;  // written, or renamed, linked, ...

  bool IsSameFile(const FileInfo& other) const {
    return device == other.device && inode == other.inode;
  }
  // Whether this is the same file with the same content, as size and time tell:
  // two writes of one size within a tick of the clock look the same. Using,
  // renaming or unlinking a file changes nothing.
  bool HasSameContent(const FileInfo& other) const {
    return IsSameFile(other) && size == other.size &&
           written_ns == other.written_ns;
  }
};

// A file system, as an open file on it tells it.
struct FileSystem {
  // The kernel's name, such as "tmpfs" or "ext4"; the number of an unknown one.
  std::string name;
  bool is_in_memory = false;
  // Whether the first write through a mapping to a page that the disk has sets
  // the file's times, and these come from this machine's clock.
  bool notes_every_write = false;
  uint64_t bytes = 0;       // 0: it has no size, or does not say
  uint64_t free_bytes = 0;  // those that this user may write
};

enum class LockResult { kHeld, kTaken, kImpossible };

// The bytes of a file in memory, read-only, until this is destroyed. Move-only.
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
  // Owns `descriptor` from now on; a negative one means that no file is open.
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File();
  File(File&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

  // The state of the file, and the file system that it is on.
  std::optional<FileInfo> Info() const noexcept;
  FileSystem GetFileSystem() const;

  // Reads all of `bytes`; EIO if the file ends before that.
  [[nodiscard]] int ReadAt(uint64_t offset,
                           std::span<uint8_t> bytes) const noexcept;
  [[nodiscard]] int WriteAt(uint64_t offset,
                            std::span<const uint8_t> bytes) const noexcept;
  // Empties the file, then sets its size and reserves the space. Where space
  // cannot be reserved, writing reports a full disk.
  [[nodiscard]] int Reserve(uint64_t size) const noexcept;
  // Returns when the disk has the content. Some file systems report a full
  // disk, or a write that failed, only here.
  [[nodiscard]] int Sync() const noexcept;
  // Takes away all rights but the owner's right to read.
  [[nodiscard]] int MakeReadOnly() const noexcept;
  // Sets the time of the file's last use.
  int SetUsed(int64_t used_ns) const noexcept;
  // Maps the first `size` bytes, which the file must have. Returns an empty
  // mapping if the system refuses.
  Mapping Map(size_t size) const noexcept;

  // Both lock the open file, or say at once that they cannot. The lock lasts
  // until the last descriptor of the open file is closed, which the death of a
  // process does, too. The two kinds know nothing of each other. Each is the
  // one that processes of other versions take: the first in a folder of objects
  // (docs/internals/block-store-format.md), the second for PartFile::Create().
  LockResult TryLock(bool exclusive) const noexcept;
  LockResult TryFlock() const noexcept;

 private:
  int descriptor_;
};

// An open folder. `name` is that of something in it.
class Directory : public File {
 public:
  using File::File;

  // Returns the folder where relative paths begin; its names are paths. It is
  // not open.
  static const Directory& Working();

  Directory OpenDirectory(const std::string& name, bool follow = false) const;
  File OpenToRead(const std::string& name, bool follow = false) const;
  // The same, but leaves the times of the file alone, if the system allows it.
  File OpenUnnoticed(const std::string& name) const;
  // Opens a file to be read and written. Makes it, for this user alone, if it
  // is missing.
  File OpenToWrite(const std::string& name) const;
  // Make a new file that only this user may read, open to be written: one
  // without a name, or one with a name that nothing has.
  File MakeUnnamed() const;
  File MakeNamed(const std::string& name) const;
  // Makes a folder for this user alone; EEXIST if something has the name.
  [[nodiscard]] int MakeDirectory(const std::string& name) const noexcept;

  // Gives an unnamed file a name; EEXIST if something has it.
  [[nodiscard]] int Link(const File& unnamed,
                         const std::string& name) const noexcept;
  // Gives a file another name. If something has that, it is replaced, or
  // without `replace` the result is EEXIST.
  [[nodiscard]] int Rename(const std::string& from, const std::string& to,
                           bool replace) const noexcept;
  // Removes a name of anything but a folder.
  int Remove(const std::string& name) const noexcept;

  std::optional<FileInfo> InfoOf(const std::string& name,
                                 bool follow = false) const noexcept;
  // Sets the times of a file's last use and last write.
  int SetTimes(const std::string& name, int64_t time_ns) const noexcept;
  // Calls `visit` with each regular file. Throws what `visit` throws.
  void VisitFiles(
      const std::function<void(std::string_view, const FileInfo&)>& visit)
      const;
};

// Whether this user may make and remove files in a folder.
bool MayChangeFolder(const std::string& path) noexcept;

// Whether a file may become this large. A process that writes beyond its limit
// gets a signal, not an error.
[[nodiscard]] bool MayBeWritten(uint64_t size) noexcept;

// Makes a system call, again and again as long as signals interrupt it.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace gkv

#endif  // GEMMAKV_IO_FILE_H_
