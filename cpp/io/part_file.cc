#include "io/part_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "io/file_access.h"

namespace gkv {
namespace {

constexpr std::chrono::milliseconds kPollInterval{10};

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
  if (error) throw IoError(folder.string(), error.value());
  const std::string path = final_path + ".part";
  const auto end = std::chrono::steady_clock::now() + patience;
  while (true) {
    // Without O_NONBLOCK, a named pipe in its place would make this wait.
    Descriptor file(open(path.c_str(),
                         O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                         0600));
    if (!file.is_open()) throw IoError(path, errno);
    struct stat info;
    if (fstat(file.get(), &info) != 0) throw IoError(path, errno);
    if (!S_ISREG(info.st_mode)) throw IoError(path, EINVAL);
    // Another user could go on writing it after it is published.
    if (info.st_uid != geteuid()) throw IoError(path, EPERM);
    if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      if (IsFileAt(file.get(), path)) {
        return PartFile(std::move(file), final_path);
      }
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) throw IoError(path, errno);
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    if (poll) poll();
    std::this_thread::sleep_for(kPollInterval);
  }
}

PartFile::PartFile(Descriptor file, std::string final_path)
    : file_(std::move(file)),
      final_path_(std::move(final_path)),
      part_path_(final_path_ + ".part") {}

// Closing the file, which drops the lock, comes last.
PartFile::~PartFile() {
  if (!file_.is_open() || published_) return;
  if (IsFileAt(file_.get(), part_path_)) unlink(part_path_.c_str());
}

void PartFile::Reserve(uint64_t size) {
  if (!MayBeWritten(size)) throw IoError(part_path_, EFBIG);
  // Empty first: nothing of a killed writer's content stays.
  if (ftruncate(file_.get(), 0) != 0 ||
      ftruncate(file_.get(), static_cast<off_t>(size)) != 0) {
    throw IoError(part_path_, errno);
  }
  // Where space cannot be reserved, writing reports a full disk.
  if (size > 0 && fallocate(file_.get(), 0, 0, static_cast<off_t>(size)) != 0 &&
      errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) {
    throw IoError(part_path_, errno);
  }
}

int PartFile::WriteAt(uint64_t offset,
                      std::span<const uint8_t> bytes) const noexcept {
  return WriteFileAt(file_.get(), offset, bytes);
}

void PartFile::Publish() {
  // Some file systems report a full disk or a failed write only here.
  if (fdatasync(file_.get()) != 0 || fchmod(file_.get(), 0400) != 0 ||
      rename(part_path_.c_str(), final_path_.c_str()) != 0) {
    throw IoError(part_path_, errno);
  }
  published_ = true;
}

}  // namespace gkv
