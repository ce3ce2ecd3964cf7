#include "store/folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/hex.h"
#include "base/process.h"
#include "base/rng.h"
#include "io/part_file.h"

namespace gkv {
namespace {

constexpr const char* kKeyName = "key";
constexpr const char* kLockName = "lock";
constexpr size_t kSaltBytes = std::tuple_size_v<decltype(FileName::salt)>;

bool IsSubfolder(std::string_view name) {
  uint8_t number;
  return ParseHex(name, {&number, 1});
}

// Returns the path without a slash at its end, with which a symbolic link would
// be followed; "" for an empty path.
std::string WithoutSlash(const std::string& path) {
  std::string text = std::filesystem::path(path).lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

// Throws for a folder that cannot be opened, in clearer words than the
// system's.
[[noreturn]] void ThrowUnopened(const std::string& path, int error) {
  const auto info = Directory::Working().InfoOf(path);
  if ((error == ENOTDIR || error == ELOOP) && info &&
      info->kind != FileInfo::Kind::kFolder) {
    const bool is_link = info->kind == FileInfo::Kind::kLink;
    throw InvalidArgument(StrCat(path, " is a ",
                                 is_link ? "symbolic link" : "file",
                                 ", expected a folder"));
  }
  throw IoError(path, error);
}

void CheckOwner(const std::string& path, const Directory& folder) {
  const auto info = folder.Info();
  if (!info) throw IoError(path, errno);
  if (info->owner != UserId()) {
    throw InvalidArgument(StrCat(path, " belongs to user ", info->owner,
                                 ", expected a folder of user ", UserId()));
  }
  if ((info->mode & 0777) != 0700) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", info->mode);
    throw InvalidArgument(StrCat(path, " has mode ", mode,
                                 ", expected 0700: a folder that is this "
                                 "user's alone"));
  }
}

// Throws if a folder without a key holds other files. Without them, another
// process is making the folder at this moment.
void CheckNothingElse(const std::string& path) {
  std::error_code error;
  const std::filesystem::directory_iterator entries(path, error);
  if (error) throw IoError(path, error.value());
  for (const auto& entry : entries) {
    const std::string name = entry.path().filename();
    if (name != kKeyName && name != kLockName && !IsSubfolder(name) &&
        !name.starts_with(kTemporaryPrefix)) {
      throw InvalidArgument(
          StrCat(path, " holds ", name, ", expected a folder of its own"));
    }
  }
}

void MakeFolder(const std::string& path) {
  if (Directory::Working().InfoOf(path)) return;
  const auto above = std::filesystem::path(path).parent_path();
  std::error_code failed;
  if (!above.empty()) std::filesystem::create_directories(above, failed);
  if (failed) throw IoError(above.string(), failed.value());
  const int error = Directory::Working().MakeDirectory(path);
  if (error != 0 && error != EEXIST) throw IoError(path, error);
  (void)FaultAt("folder-done");
}

}  // namespace

std::string FileName::Text() const {
  return StrCat(name.Hex(), "-", parent.Hex(), "-", end, "-", ToHex(salt), "-",
                static_cast<uint32_t>(kind));
}

std::string FileName::Subfolder() const {
  return Folder::SubfolderName(name.bytes[0]);
}

bool FileName::HangsOnObject() const {
  if (parent == ObjectName{}) return false;
  return kind == ObjectKind::kWindowPage ||
         end >= (kind == ObjectKind::kPage ? 2 * kPageTokens : kPageTokens);
}

std::optional<FileName> FileName::Parse(std::string_view text) {
  std::array<std::string_view, 5> parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t dash = i + 1 < parts.size() ? text.find('-') : text.size();
    if (dash == text.npos) return std::nullopt;
    parts[i] = text.substr(0, dash);
    text.remove_prefix(std::min(dash + 1, text.size()));
  }
  FileName result;
  const char* const end = parts[2].data() + parts[2].size();
  if (!ParseHex(parts[0], result.name.bytes) ||
      !ParseHex(parts[1], result.parent.bytes) ||
      !ParseHex(parts[3], result.salt) || parts[2].empty() ||
      (parts[2].size() > 1 && parts[2][0] == '0')) {
    return std::nullopt;
  }
  const auto number = std::from_chars(parts[2].data(), end, result.end);
  if (number.ec != std::errc() || number.ptr != end || parts[4].size() != 1 ||
      parts[4][0] < '1' || parts[4][0] > '3') {
    return std::nullopt;
  }
  result.kind = static_cast<ObjectKind>(parts[4][0] - '0');
  return result;
}

std::string Folder::SubfolderName(size_t i) {
  const auto byte = static_cast<uint8_t>(i);
  return ToHex({&byte, 1});
}

std::shared_ptr<const Folder> Folder::Open(const std::string& given,
                                           bool make) {
  const std::string path = WithoutSlash(given);
  if (path.empty()) throw InvalidArgument("a folder's path is empty");
  constexpr int kTries = 20;
  for (int tries = 1;; ++tries) {
    try {
      if (make) MakeFolder(path);
      Directory directory = Directory::Working().OpenDirectory(path);
      if (!directory.is_open()) ThrowUnopened(path, errno);
      CheckOwner(path, directory);
      const std::shared_ptr<Folder> folder(new Folder(std::move(directory)));
      folder->FindKey(path, make);
      return folder;
    } catch (const IoError& error) {
      // Another process deletes it at this moment.
      if (!make || error.error_number() != ENOENT || tries == kTries) throw;
    }
  }
}

Folder::KeyState Folder::ReadKey() {
  const File file = directory_.OpenToRead(kKeyName);
  if (!file.is_open()) {
    return errno == ENOENT ? KeyState::kMissing : KeyState::kBad;
  }
  const auto info = file.Info();
  const bool sound = info && info->kind == FileInfo::Kind::kRegular &&
                     info->owner == UserId() && (info->mode & 0277) == 0 &&
                     info->size == key_.size() && file.ReadAt(0, key_) == 0;
  return sound ? KeyState::kRead : KeyState::kBad;
}

void Folder::FindKey(const std::string& path, bool make) {
  const std::string key_path = path + "/" + kKeyName;
  KeyState state = ReadKey();
  std::optional<File> lock;
  if (state == KeyState::kBad && make) {
    // The key is torn or a stranger's. One process at a time repairs it, so
    // that none removes another's new key.
    lock.emplace(OpenLock());
    constexpr int kTries = 500;
    for (int i = 0; lock->TryLock(true) == LockResult::kTaken; ++i) {
      if (i == kTries) throw IoError(path + "/" + kLockName, EAGAIN);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    state = ReadKey();
    const int error =
        state == KeyState::kBad ? directory_.Remove(kKeyName) : 0;
    if (error != 0 && error != ENOENT) throw IoError(key_path, error);
  }
  if (state != KeyState::kRead && make) {
    CheckNothingElse(path);
    std::array<uint64_t, 4> random;
    for (uint64_t& part : random) part = RandomSeed();
    const int error =
        FaultAt("key") != 0
            ? EIO
            : PublishIn(directory_, kKeyName, AsBytes(random), true);
    if (error != 0 && error != EEXIST) throw IoError(key_path, error);
    state = ReadKey();
  }
  if (state == KeyState::kRead) return;
  if (state == KeyState::kMissing) {
    if (make) throw IoError(key_path, ENOENT);
    throw InvalidArgument(StrCat(
        path, " has no file `key`, expected a folder of stored objects"));
  }
  throw CorruptFile(StrCat(key_path, ": expected 32 bytes of this user's"));
}

Folder::Place Folder::PlaceOf(const std::string& path) const {
  (void)FaultAt("folder-look");
  const auto there = Directory::Working().InfoOf(WithoutSlash(path));
  if (!there) return Place::kGone;
  const auto here = directory_.Info();
  return here && here->IsSameFile(*there) ? Place::kHere : Place::kOther;
}

FileName Folder::NameFor(const ObjectKey& key) const {
  FileName name;
  name.name = NameOf(key.address, key_);
  if (key.parent != Address{}) name.parent = NameOf(key.parent, key_);
  name.end = key.end;
  std::copy_n(key.salt.bytes.begin(), kSaltBytes, name.salt.begin());
  name.kind = key.kind;
  return name;
}

ObjectName Folder::NameOfAddress(const Address& address) const {
  return NameOf(address, key_);
}

Directory Folder::OpenSubfolder(const std::string& name, bool make) const {
  Directory folder = directory_.OpenDirectory(name);
  if (folder.is_open() || errno != ENOENT || !make) return folder;
  const int error = directory_.MakeDirectory(name);
  if (error != 0 && error != EEXIST) return folder;
  (void)FaultAt("subfolder-done");
  return directory_.OpenDirectory(name);
}

File Folder::OpenLock() const { return directory_.OpenToWrite(kLockName); }

int Folder::Publish(const FileName& name,
                    std::span<const uint8_t> bytes) const noexcept {
  try {
    const std::string folder_name = name.Subfolder();
    int error = 0;
    // A subfolder that another process deletes at this moment is made again.
    for (int i = 0; i < 3; ++i) {
      const Directory folder = OpenSubfolder(folder_name, true);
      error = folder.is_open()
                  ? PublishIn(folder, name.Text(), bytes, false)
                  : errno;
      if (error != ENOENT) break;
    }
    return error;
  } catch (const std::exception&) {
    return ENOMEM;
  }
}

int Folder::PublishIn(const Directory& folder, const std::string& name,
                      std::span<const uint8_t> bytes, bool durable) const {
  if (folder.InfoOf(name)) return EEXIST;
  if (!MayBeWritten(bytes.size())) return EFBIG;
  int error = 0;
  {
    std::optional<PartFile> part;
    try {
      part.emplace(
          PartFile::CreateIn(folder, name, kTemporaryPrefix, named_only_));
      error = FaultAt("opened");
      const size_t half = bytes.size() / 2;
      if (error == 0) error = part->WriteAt(0, bytes.first(half));
      if (error == 0) error = FaultAt("half-written");
      if (error == 0) error = part->WriteAt(half, bytes.subspan(half));
      if (error == 0) error = FaultAt("written");
      if (error == 0) part->Publish(durable);
    } catch (const IoError& failed) {
      error = failed.error_number();
    }
    if (error == ENOENT && part && !part->is_named()) {
      const auto info = folder.Info();
      if (!info || info->links > 0) named_only_ = true;
    }
  }
  (void)FaultAt("linked");
  return error;
}

}  // namespace gkv
