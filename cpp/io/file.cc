#include "io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdio>

#include "base/time.h"

// Headers of older C libraries lack these.
#ifndef O_TMPFILE
#define O_TMPFILE (020000000 | O_DIRECTORY)
#endif
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

namespace gkv {
namespace {

struct KnownFileSystem {
  uint32_t magic;
  const char* name;
  bool is_in_memory = false;
  bool notes_every_write = false;
};
constexpr KnownFileSystem kFileSystems[] = {
    {0x01021994, "tmpfs", true},        {0x858458F6, "ramfs", true},
    {0xEF53, "ext4", false, true},      {0x58465342, "xfs", false, true},
    {0x9123683E, "btrfs", false, true}, {0xF2F52010, "f2fs", false, true},
    {0x794C7630, "overlay"},            {0x2FC12FC1, "zfs"},
    {0x6969, "nfs"},                    {0xFF534D42, "cifs"},
    {0xFE534D42, "smb2"},               {0x65735546, "fuse"},
    {0x01021997, "9p"},                 {0x4D44, "vfat"},
    {0x2011BAB0, "exfat"}};

// Returns 0 if `result` is that of a system call that succeeded, else errno.
int ErrnoOf(int result) { return result == 0 ? 0 : errno; }

FileInfo::Kind KindOf(mode_t mode) {
  if (S_ISREG(mode)) return FileInfo::Kind::kRegular;
  if (S_ISDIR(mode)) return FileInfo::Kind::kFolder;
  return S_ISLNK(mode) ? FileInfo::Kind::kLink : FileInfo::Kind::kOther;
}

FileInfo InfoFrom(const struct stat& info) {
  return {.kind = KindOf(info.st_mode),
          .mode = info.st_mode & 07777u,
          .owner = info.st_uid,
          .device = static_cast<uint64_t>(info.st_dev),
          .inode = static_cast<uint64_t>(info.st_ino),
          .links = static_cast<uint64_t>(info.st_nlink),
          .size = static_cast<uint64_t>(info.st_size),
          .used_ns = Nanoseconds(info.st_atim),
          .written_ns = Nanoseconds(info.st_mtim),
          .changed_ns = Nanoseconds(info.st_ctim)};
}

int OpenAt(const File& folder, const char* name, int flags, mode_t mode = 0) {
  return Uninterrupted([&] {
    return openat(folder.get(), name, flags | O_CLOEXEC, mode);
  });
}

// Reads or writes until nothing is left of `bytes`. Returns 0 or an errno
// value: that of `none` if a call transfers nothing.
template <typename Call, typename Byte>
int Repeat(const Call& call, int file, uint64_t offset, std::span<Byte> bytes,
           int none) {
  while (!bytes.empty()) {
    const ssize_t done = Uninterrupted([&] {
      return call(file, bytes.data(), bytes.size(),
                  static_cast<off_t>(offset));
    });
    if (done <= 0) return done < 0 ? errno : none;
    offset += static_cast<uint64_t>(done);
    bytes = bytes.subspan(static_cast<size_t>(done));
  }
  return 0;
}

}  // namespace

void Mapping::Unmap::operator()(const uint8_t* data) const noexcept {
  munmap(const_cast<uint8_t*>(data), size);
}

File::~File() {
  if (is_open()) close(descriptor_);
}

std::optional<FileInfo> File::Info() const noexcept {
  struct stat info;
  if (fstat(descriptor_, &info) != 0) return std::nullopt;
  return InfoFrom(info);
}

FileSystem File::GetFileSystem() const {
  struct statfs info = {};
  FileSystem found;
  if (fstatfs(descriptor_, &info) == 0) {
    const auto unit = static_cast<uint64_t>(info.f_frsize != 0 ? info.f_frsize
                                                               : info.f_bsize);
    found.bytes = uint64_t{info.f_blocks} * unit;
    found.free_bytes = uint64_t{info.f_bavail} * unit;
  }
  const auto magic = static_cast<uint32_t>(info.f_type);
  for (const KnownFileSystem& known : kFileSystems) {
    if (known.magic != magic) continue;
    found.name = known.name;
    found.is_in_memory = known.is_in_memory;
    found.notes_every_write = known.notes_every_write;
    return found;
  }
  char text[16];
  std::snprintf(text, sizeof(text), "0x%x", magic);
  found.name = text;
  return found;
}

int File::ReadAt(uint64_t offset, std::span<uint8_t> bytes) const noexcept {
  return Repeat(pread, descriptor_, offset, bytes, EIO);
}

int File::WriteAt(uint64_t offset,
                  std::span<const uint8_t> bytes) const noexcept {
  return Repeat(pwrite, descriptor_, offset, bytes, ENOSPC);
}

int File::Reserve(uint64_t size) const noexcept {
  const auto length = static_cast<off_t>(size);
  if (ftruncate(descriptor_, 0) != 0 || ftruncate(descriptor_, length) != 0) {
    return errno;
  }
  if (size == 0 || fallocate(descriptor_, 0, 0, length) == 0 ||
      errno == EOPNOTSUPP || errno == ENOSYS || errno == EINTR) {
    return 0;
  }
  return errno;
}

int File::Sync() const noexcept { return ErrnoOf(fsync(descriptor_)); }

int File::MakeReadOnly() const noexcept {
  return ErrnoOf(fchmod(descriptor_, 0400));
}

int File::SetUsed(int64_t used_ns) const noexcept {
  const struct timespec times[2] = {TimespecOf(used_ns), {0, UTIME_OMIT}};
  return ErrnoOf(futimens(descriptor_, times));
}

Mapping File::Map(size_t size) const noexcept {
  Mapping mapping;
  void* const data =
      mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor_, 0);
  if (data == MAP_FAILED) return mapping;
  mapping.data_ = {static_cast<const uint8_t*>(data), Mapping::Unmap{size}};
  return mapping;
}

LockResult File::TryLock(bool exclusive) const noexcept {
  struct flock lock = {};
  lock.l_type = static_cast<short>(exclusive ? F_WRLCK : F_RDLCK);
  lock.l_whence = SEEK_SET;
  if (Uninterrupted([&] { return fcntl(get(), F_OFD_SETLK, &lock); }) == 0) {
    return LockResult::kHeld;
  }
  return errno == EAGAIN || errno == EACCES ? LockResult::kTaken
                                            : LockResult::kImpossible;
}

LockResult File::TryFlock() const noexcept {
  if (Uninterrupted([&] { return flock(get(), LOCK_EX | LOCK_NB); }) == 0) {
    return LockResult::kHeld;
  }
  return errno == EWOULDBLOCK ? LockResult::kTaken : LockResult::kImpossible;
}

const Directory& Directory::Working() {
  static const Directory working(AT_FDCWD);
  return working;
}

Directory Directory::OpenDirectory(const std::string& name,
                                   bool follow) const {
  return Directory(OpenAt(*this, name.c_str(),
                          O_RDONLY | O_DIRECTORY | (follow ? 0 : O_NOFOLLOW)));
}

File Directory::OpenToRead(const std::string& name, bool follow) const {
  return File(OpenAt(*this, name.c_str(),
                     O_RDONLY | O_NONBLOCK | (follow ? 0 : O_NOFOLLOW)));
}

File Directory::OpenUnnoticed(const std::string& name) const {
  const int file = OpenAt(*this, name.c_str(),
                          O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOATIME);
  // O_NOATIME is for the owner of the file alone.
  return file < 0 && errno == EPERM ? OpenToRead(name) : File(file);
}

File Directory::OpenToWrite(const std::string& name) const {
  return File(OpenAt(*this, name.c_str(),
                     O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0600));
}

File Directory::MakeUnnamed() const {
  return File(OpenAt(*this, ".", O_TMPFILE | O_WRONLY, 0400));
}

File Directory::MakeNamed(const std::string& name) const {
  return File(OpenAt(*this, name.c_str(),
                     O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0400));
}

int Directory::MakeDirectory(const std::string& name) const noexcept {
  return ErrnoOf(mkdirat(get(), name.c_str(), 0700));
}

int Directory::Link(const File& unnamed,
                    const std::string& name) const noexcept {
  if (linkat(unnamed.get(), "", get(), name.c_str(), AT_EMPTY_PATH) == 0) {
    return 0;
  }
  // AT_EMPTY_PATH needs a privilege before Linux 6.10.
  if (errno != ENOENT && errno != EPERM && errno != EINVAL) return errno;
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", unnamed.get());
  return ErrnoOf(
      linkat(AT_FDCWD, path, get(), name.c_str(), AT_SYMLINK_FOLLOW));
}

int Directory::Rename(const std::string& from, const std::string& to,
                      bool replace) const noexcept {
  if (replace) {
    return ErrnoOf(renameat(get(), from.c_str(), get(), to.c_str()));
  }
#ifdef SYS_renameat2
  constexpr unsigned kNoReplace = 1;
  if (syscall(SYS_renameat2, get(), from.c_str(), get(), to.c_str(),
              kNoReplace) == 0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) return errno;
#endif
  if (linkat(get(), from.c_str(), get(), to.c_str(), 0) != 0) return errno;
  Remove(from);
  return 0;
}

int Directory::Remove(const std::string& name) const noexcept {
  return ErrnoOf(unlinkat(get(), name.c_str(), 0));
}

std::optional<FileInfo> Directory::InfoOf(const std::string& name,
                                          bool follow) const noexcept {
  struct stat info;
  if (fstatat(get(), name.c_str(), &info,
              follow ? 0 : AT_SYMLINK_NOFOLLOW) != 0) {
    return std::nullopt;
  }
  return InfoFrom(info);
}

int Directory::SetTimes(const std::string& name,
                        int64_t time_ns) const noexcept {
  const struct timespec time = TimespecOf(time_ns);
  const struct timespec times[2] = {time, time};
  return ErrnoOf(
      utimensat(get(), name.c_str(), times, AT_SYMLINK_NOFOLLOW));
}

void Directory::VisitFiles(
    const std::function<void(std::string_view, const FileInfo&)>& visit)
    const {
  struct Close {
    void operator()(DIR* stream) const { closedir(stream); }
  };
  // This needs a descriptor of its own: duplicates share one position.
  const int own = OpenAt(*this, ".", O_RDONLY | O_DIRECTORY);
  if (own < 0) return;
  const std::unique_ptr<DIR, Close> stream(fdopendir(own));
  if (!stream) {
    close(own);
    return;
  }
  while (const dirent* const entry = readdir(stream.get())) {
    struct stat info;
    if (fstatat(get(), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(info.st_mode)) {
      visit(entry->d_name, InfoFrom(info));
    }
  }
}

bool MayChangeFolder(const std::string& path) noexcept {
  return access(path.c_str(), W_OK) == 0;
}

bool MayBeWritten(uint64_t size) noexcept {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
         limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur;
}

}  // namespace gkv
