#include "io/part_file.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "base/hex.h"
#include "base/process.h"
#include "base/rng.h"

namespace gkv {
namespace {

constexpr std::chrono::milliseconds kPollInterval{10};

// Whether the open file has that name. The holder of the lock renames or
// deletes its part file before it drops the lock, so a process that gets the
// lock of a file that is not there any more starts again.
bool IsFileAt(const File& file, const Directory& folder,
              const std::string& name) {
  const auto open_file = file.Info(), named = folder.InfoOf(name);
  return open_file && named && open_file->IsSameFile(*named);
}

}  // namespace

std::optional<PartFile> PartFile::Create(const std::string& final_path,
                                         std::chrono::milliseconds patience,
                                         const std::function<void()>& poll) {
  const std::filesystem::path above =
      std::filesystem::path(final_path).parent_path();
  std::error_code error;
  if (!above.empty()) std::filesystem::create_directories(above, error);
  if (error) throw IoError(above.string(), error.value());
  const Directory& folder = Directory::Working();
  const std::string path = final_path + ".part";
  const auto end = std::chrono::steady_clock::now() + patience;
  while (true) {
    File file = folder.OpenToWrite(path);
    if (!file.is_open()) throw IoError(path, errno);
    const auto info = file.Info();
    if (!info) throw IoError(path, errno);
    if (info->kind != FileInfo::Kind::kRegular) throw IoError(path, EINVAL);
    // Another user could still write to it after it is published.
    if (info->owner != UserId()) throw IoError(path, EPERM);
    const LockResult lock = file.TryFlock();
    if (lock == LockResult::kImpossible) throw IoError(path, errno);
    if (lock == LockResult::kHeld) {
      if (!IsFileAt(file, folder, path)) continue;
      return PartFile(folder, std::move(file), final_path, path, true);
    }
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    if (poll) poll();
    std::this_thread::sleep_for(kPollInterval);
  }
}

PartFile PartFile::CreateIn(const Directory& folder, std::string name,
                            std::string_view prefix, bool named) {
  if (!named) {
    const bool refused = FaultAt("unnamed") != 0;
    File file = refused ? File(-1) : folder.MakeUnnamed();
    if (file.is_open()) {
      return PartFile(folder, std::move(file), std::move(name), "", false);
    }
    if (!refused && errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) {
      throw IoError(name, errno);
    }
  }
  std::string part = StrCat(prefix, ToHex(RandomSeed()));
  File file = folder.MakeNamed(part);
  if (!file.is_open()) throw IoError(part, errno);
  // If locks do not work here, nobody takes the file for that of a dead writer.
  (void)file.TryLock(true);
  return PartFile(folder, std::move(file), std::move(name), std::move(part),
                  false);
}

PartFile::PartFile(const Directory& folder, File file, std::string final_name,
                   std::string part_name, bool replaces)
    : folder_(&folder),
      file_(std::move(file)),
      final_name_(std::move(final_name)),
      part_name_(std::move(part_name)),
      replaces_(replaces) {}

// The file is closed last, which drops the lock.
PartFile::~PartFile() {
  if (!file_.is_open() || published_ || !is_named()) return;
  if (IsFileAt(file_, *folder_, part_name_)) folder_->Remove(part_name_);
}

void PartFile::Reserve(uint64_t size) {
  const int error = MayBeWritten(size) ? file_.Reserve(size) : EFBIG;
  if (error != 0) throw IoError(part_name_, error);
}

void PartFile::Publish(bool durable) {
  int error = durable ? file_.Sync() : 0;
  if (error == 0 && replaces_) error = file_.MakeReadOnly();
  if (error == 0) {
    error = is_named() ? folder_->Rename(part_name_, final_name_, replaces_)
                       : folder_->Link(file_, final_name_);
  }
  if (error != 0) throw IoError(is_named() ? part_name_ : final_name_, error);
  published_ = true;
}

}  // namespace gkv
