#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <cerrno>
#include <ctime>

#include "base/error.h"
#include "base/rounding.h"
#include "base/time.h"
#include "io/descriptor.h"

namespace gkv {
namespace {

// Two writes within a tick of the file system's clock have the same time.
constexpr int64_t kTickNs = 2'000'000'000;

Hash128 HashOf(std::initializer_list<int64_t> values) {
  Hasher hasher;
  for (const int64_t value : values) hasher.UpdateValue(value);
  return hasher.Finish();
}

Hash128 PlaceOf(const struct stat& info) {
  return HashOf({static_cast<int64_t>(info.st_dev),
                 static_cast<int64_t>(info.st_ino)});
}

Hash128 IdentityOf(const struct stat& info) {
  return HashOf({static_cast<int64_t>(info.st_dev),
                 static_cast<int64_t>(info.st_ino), int64_t{info.st_size},
                 Nanoseconds(info.st_mtim), Nanoseconds(info.st_ctim)});
}

// Whether the first write through a mapping to a page that the disk has sets
// the file's times, and they come from this machine's clock: ext2 to ext4, XFS,
// Btrfs, F2FS.
bool NotesEveryWrite(int file) {
  struct statfs info;
  if (fstatfs(file, &info) != 0) return false;
  const auto type = static_cast<uint32_t>(info.f_type);
  return type == 0xEF53 || type == 0x58465342 || type == 0x9123683E ||
         type == 0xF2F52010;
}

// Of whole pages around the bytes. A hint: nothing is wrong if it is not taken.
void Advise(const uint8_t* data, size_t size, int advice) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t past = reinterpret_cast<uintptr_t>(data) % page;
  (void)madvise(const_cast<uint8_t*>(data) - past, size + past, advice);
}

}  // namespace

void ExpectScatteredReads(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_RANDOM);
  // Nor does a fault map all of what the system caches as one large page.
  Advise(data, size, MADV_NOHUGEPAGE);
}

void PreferLargePages(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_HUGEPAGE);
}

void PrefetchPages(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_WILLNEED);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK, opening a named pipe would wait for its writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) throw IoError(path, errno);
  struct stat info;
  if (fstat(file.get(), &info) != 0) throw IoError(path, errno);
  if (S_ISDIR(info.st_mode)) throw IoError(path, EISDIR);
  if (!S_ISREG(info.st_mode)) throw IoError(path, EINVAL);
  if (info.st_size == 0) {
    throw CorruptFile(
        StrCat(path, ": offset 0: found an empty file, expected content"));
  }
  owner_ = info.st_uid;
  identity_ = IdentityOf(info);
  place_ = PlaceOf(info);
  const auto size = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw IoError(path, errno);
  data_ = {static_cast<uint8_t*>(data), Unmap{size}};
}

void MappedFile::Unmap::operator()(uint8_t* data) const noexcept {
  munmap(data, size);
}

bool MappedFile::IsInPlace() const {
  struct stat info;
  return stat(path_.c_str(), &info) == 0 && PlaceOf(info) == place_;
}

bool MappedFile::Settle(std::chrono::seconds later) const {
  const Descriptor file(
      open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct timespec now;
  struct stat info;
  const auto is_same = [&] {
    return fstat(file.get(), &info) == 0 && IdentityOf(info) == identity_;
  };
  if (!file.is_open() || clock_gettime(CLOCK_REALTIME, &now) != 0 ||
      !is_same() || !NotesEveryWrite(file.get()) ||
      std::max(Nanoseconds(info.st_mtim), Nanoseconds(info.st_ctim)) >=
          Nanoseconds(now) + std::chrono::nanoseconds(later).count() -
              kTickNs) {
    return false;
  }
  // A page that a program has mapped and written to may be written to again
  // without a trace, until the disk has it. Behind fsync() the first write to
  // each page sets the times, and by now that would be another identity.
  return fsync(file.get()) == 0 && is_same();
}

bool MappedFile::Populate(size_t offset, size_t size) const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = offset / page * page;
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14
  return madvise(data_.get() + begin, offset + size - begin, kPopulateRead) ==
             0 ||
         (errno != EFAULT && errno != EHWPOISON);
}

void MappedFile::DropPages(size_t offset, size_t size) const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped = bytes().size();
  if (offset > mapped) return;
  const size_t end = (offset + std::min(size, mapped - offset)) / page * page;
  const size_t begin = RoundUp(offset, page);
  if (begin >= end) return;
  // A hint: nothing is wrong if it is not taken.
  (void)madvise(data_.get() + begin, end - begin, MADV_DONTNEED);
}

}  // namespace gkv
