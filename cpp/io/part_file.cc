#include "io/part_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

constexpr std::chrono::milliseconds kPollInterval{10};

[[noreturn]] void FailAt(const std::string& path, int error_number) {
  throw IoError(StrCat(path, ": ", std::strerror(error_number)), error_number,
                path);
}

// Closes on destruction unless released.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Whether `path` names the open file. A holder renames or deletes its part
// file before it drops the lock, so whoever gets the lock of a file that is not
// there any more starts again.
bool IsFileAt(int fd, const std::string& path) {
  struct stat open_file, at_path;
  return fstat(fd, &open_file) == 0 && lstat(path.c_str(), &at_path) == 0 &&
         open_file.st_dev == at_path.st_dev &&
         open_file.st_ino == at_path.st_ino;
}

}  // namespace

std::optional<PartFile> PartFile::Create(const std::string& final_path,
                                         std::chrono::milliseconds patience,
                                         const std::function<void()>& poll) {
  const std::filesystem::path folder =
      std::filesystem::path(final_path).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) FailAt(folder.string(), error.value());
  const std::string path = final_path + ".part";
  const auto end = std::chrono::steady_clock::now() + patience;
  while (true) {
    // Without O_NONBLOCK, a named pipe in its place would make this wait.
    Descriptor file(open(path.c_str(),
                         O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                         0600));
    if (file.get() < 0) FailAt(path, errno);
    struct stat info;
    if (fstat(file.get(), &info) != 0) FailAt(path, errno);
    if (!S_ISREG(info.st_mode)) FailAt(path, EINVAL);
    // Another user could go on writing it after it is published.
    if (info.st_uid != geteuid()) FailAt(path, EPERM);
    if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      if (IsFileAt(file.get(), path)) {
        return PartFile(file.Release(), final_path);
      }
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) FailAt(path, errno);
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    if (poll) poll();
    std::this_thread::sleep_for(kPollInterval);
  }
}

PartFile::PartFile(int fd, std::string final_path)
    : fd_(fd),
      final_path_(std::move(final_path)),
      part_path_(final_path_ + ".part") {}

PartFile::PartFile(PartFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      final_path_(std::move(other.final_path_)),
      part_path_(std::move(other.part_path_)),
      published_(other.published_) {}

PartFile::~PartFile() {
  if (fd_ < 0) return;
  if (!published_ && IsFileAt(fd_, part_path_)) unlink(part_path_.c_str());
  close(fd_);  // drops the lock
}

void PartFile::Fail(int error_number) const {
  FailAt(part_path_, error_number);
}

void PartFile::Reserve(uint64_t size) {
  // Writing beyond this limit would be a signal, not an error.
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      size > limit.rlim_cur) {
    Fail(EFBIG);
  }
  // Empty first: nothing of a killed writer's content stays.
  if (ftruncate(fd_, 0) != 0 || ftruncate(fd_, static_cast<off_t>(size)) != 0) {
    Fail(errno);
  }
  // Where space cannot be reserved, writing reports a full disk.
  if (size > 0 && fallocate(fd_, 0, 0, static_cast<off_t>(size)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) {
    Fail(errno);
  }
}

int PartFile::WriteAt(uint64_t offset,
                      std::span<const uint8_t> bytes) const noexcept {
  while (!bytes.empty()) {
    const ssize_t written =
        pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    offset += static_cast<uint64_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return 0;
}

void PartFile::Publish() {
  // Some file systems report a full disk or a failed write only here.
  if (fdatasync(fd_) != 0 || fchmod(fd_, 0400) != 0 ||
      rename(part_path_.c_str(), final_path_.c_str()) != 0) {
    Fail(errno);
  }
  published_ = true;
}

}  // namespace gkv
