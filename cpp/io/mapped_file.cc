#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/rounding.h"
#include "io/descriptor.h"

namespace gkv {

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
  size_ = static_cast<size_t>(info.st_size);
  owner_ = info.st_uid;
  void* data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw IoError(path, errno);
  data_ = static_cast<const uint8_t*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      owner_(other.owner_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_, other.owner_);
  return *this;
}

void MappedFile::DropPages(size_t offset, size_t size) const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (offset > size_) return;
  const size_t end = (offset + std::min(size, size_ - offset)) / page * page;
  const size_t begin = RoundUp(offset, page);
  if (begin >= end) return;
  // A hint: nothing is wrong if it is not taken.
  (void)madvise(const_cast<uint8_t*>(data_) + begin, end - begin,
                MADV_DONTNEED);
}

}  // namespace gkv
