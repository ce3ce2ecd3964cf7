#include "io/mapped_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>

#include "base/error.h"
#include "base/process.h"
#include "base/rounding.h"
#include "base/time.h"

namespace gkv {
namespace {

// Two writes within a tick of the file system's clock have the same time.
constexpr int64_t kTickNs = 2 * kSecondNs;

Hash128 HashOf(std::initializer_list<uint64_t> values) {
  Hasher hasher;
  for (const uint64_t value : values) hasher.UpdateValue(value);
  return hasher.Finish();
}

Hash128 PlaceOf(const FileInfo& info) {
  return HashOf({info.device, info.inode});
}

Hash128 IdentityOf(const FileInfo& info) {
  return HashOf({info.device, info.inode, info.size,
                 static_cast<uint64_t>(info.written_ns),
                 static_cast<uint64_t>(info.changed_ns)});
}

int AdviseOn(const uint8_t* data, size_t size, int advice) {
  return madvise(const_cast<uint8_t*>(data), size, advice);
}

// Advises the system on the whole pages around the bytes. This is a hint:
// nothing is wrong if the system does not take it.
void Advise(const uint8_t* data, size_t size, int advice) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(data) % PageBytes();
  (void)AdviseOn(data - past, size + past, advice);
}

}  // namespace

void ExpectScatteredReads(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_RANDOM);
  // A fault is not to map all that the system caches as one large page, either.
  Advise(data, size, MADV_NOHUGEPAGE);
}

void PreferLargePages(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_HUGEPAGE);
}

void PrefetchPages(const uint8_t* data, size_t size) {
  Advise(data, size, MADV_WILLNEED);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const File file = Directory::Working().OpenToRead(path, true);
  if (!file.is_open()) throw IoError(path, errno);
  const auto info = file.Info();
  if (!info) throw IoError(path, errno);
  if (info->kind != FileInfo::Kind::kRegular) {
    throw IoError(path,
                  info->kind == FileInfo::Kind::kFolder ? EISDIR : EINVAL);
  }
  if (info->size == 0) {
    throw CorruptFile(
        StrCat(path, ": offset 0: found an empty file, expected content"));
  }
  owner_ = info->owner;
  identity_ = IdentityOf(*info);
  place_ = PlaceOf(*info);
  mapping_ = file.Map(static_cast<size_t>(info->size));
  if (bytes().empty()) throw IoError(path, errno);
}

bool MappedFile::IsInPlace() const {
  const auto info = Directory::Working().InfoOf(path_, true);
  return info && PlaceOf(*info) == place_;
}

bool MappedFile::Settle(std::chrono::seconds later) const {
  const File file = Directory::Working().OpenToRead(path_, true);
  const int64_t now =
      WallClockNs() + std::chrono::nanoseconds(later).count();
  const auto info = file.Info();
  if (!info || IdentityOf(*info) != identity_ ||
      !file.GetFileSystem().notes_every_write ||
      std::max(info->written_ns, info->changed_ns) >= now - kTickNs) {
    return false;
  }
  // A page that a program has mapped and written to may be written to again
  // without a trace, until the disk has it. After fsync() the first write to
  // each page sets the times, and by now that would be another identity.
  if (file.Sync() != 0) return false;
  const auto synced = file.Info();
  return synced && IdentityOf(*synced) == identity_;
}

bool MappedFile::Populate(size_t offset, size_t size) const {
  const size_t page = PageBytes();
  const size_t begin = offset / page * page;
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14
  return AdviseOn(bytes().data() + begin, offset + size - begin,
                  kPopulateRead) == 0 ||
         (errno != EFAULT && errno != EHWPOISON);
}

void MappedFile::DropPages(size_t offset, size_t size) const {
  const size_t page = PageBytes();
  const size_t mapped = bytes().size();
  if (offset > mapped) return;
  const size_t end = (offset + std::min(size, mapped - offset)) / page * page;
  const size_t begin = RoundUp(offset, page);
  if (begin >= end) return;
  // This is a hint, too.
  (void)AdviseOn(bytes().data() + begin, end - begin, MADV_DONTNEED);
}

}  // namespace gkv
