#include "store/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

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
#include "base/rng.h"
#include "io/file_access.h"

// Headers of older C libraries lack these.
#ifndef O_TMPFILE
#define O_TMPFILE (020000000 | O_DIRECTORY)
#endif
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

namespace gkv {
namespace {

constexpr const char* kKeyName = "key";
constexpr const char* kLockName = "lock";
constexpr size_t kSaltBytes = std::tuple_size_v<decltype(FileName::salt)>;

std::string Hex(std::span<const uint8_t> bytes) {
  std::string hex;
  for (const uint8_t byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

bool ParseHex(std::string_view text, std::span<uint8_t> bytes) {
  if (text.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char* const at = text.data() + 2 * i;
    if (std::from_chars(at, at + 2, bytes[i], 16).ptr != at + 2) return false;
  }
  return true;
}

bool IsSubfolder(std::string_view name) {
  uint8_t number;
  return ParseHex(name, {&number, 1});
}

// "" for an empty one. Ends with no slash: behind one, a symbolic link would be
// followed.
std::string WithoutSlash(const std::string& path) {
  std::string text = std::filesystem::path(path).lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

Descriptor OpenFolder(int at, const char* path) {
  return Descriptor(Uninterrupted([&] {
    return openat(at, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  }));
}

// A folder that cannot be opened, in words where the system's do not do.
[[noreturn]] void ThrowUnopened(const std::string& path, int error) {
  struct stat info;
  if ((error == ENOTDIR || error == ELOOP) && lstat(path.c_str(), &info) == 0 &&
      !S_ISDIR(info.st_mode)) {
    throw InvalidArgument(
        StrCat(path, " is a ", S_ISLNK(info.st_mode) ? "symbolic link" : "file",
               ", expected a folder"));
  }
  throw IoError(path, error);
}

void CheckOwner(const std::string& path, int folder) {
  struct stat info;
  if (fstat(folder, &info) != 0) throw IoError(path, errno);
  if (info.st_uid != geteuid()) {
    throw InvalidArgument(StrCat(path, " belongs to user ", info.st_uid,
                                 ", expected a folder of user ", geteuid()));
  }
  if ((info.st_mode & 0777) != 0700) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", info.st_mode & 07777u);
    throw InvalidArgument(StrCat(path, " has mode ", mode,
                                 ", expected 0700: a folder that is this "
                                 "user's alone"));
  }
}

// A folder without a key is one that somebody makes at this moment, or that has
// nothing to do with this.
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
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) return;
  const auto above = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!above.empty()) std::filesystem::create_directories(above, error);
  if (error) throw IoError(above.string(), error.value());
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw IoError(path, errno);
  }
  (void)FaultAt("folder-done");
}

int LinkNamed(int folder, const std::string& from, const std::string& to) {
#ifdef SYS_renameat2
  constexpr unsigned kNoReplace = 1;
  if (syscall(SYS_renameat2, folder, from.c_str(), folder, to.c_str(),
              kNoReplace) == 0) {
    return 0;
  }
  if (errno != EINVAL && errno != ENOSYS) return errno;
#endif
  if (linkat(folder, from.c_str(), folder, to.c_str(), 0) != 0) return errno;
  unlinkat(folder, from.c_str(), 0);
  return 0;
}

int LinkUnnamed(int file, int folder, const std::string& name) {
  if (linkat(file, "", folder, name.c_str(), AT_EMPTY_PATH) == 0) return 0;
  // That needs a privilege before Linux 6.10.
  if (errno != ENOENT && errno != EPERM && errno != EINVAL) return errno;
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  return linkat(AT_FDCWD, path.c_str(), folder, name.c_str(),
                AT_SYMLINK_FOLLOW) == 0
             ? 0
             : errno;
}

bool IsUnlinked(int folder) {
  struct stat info;
  return fstat(folder, &info) == 0 && info.st_nlink == 0;
}

struct KnownFileSystem {
  uint32_t magic;
  const char* name;
};
constexpr uint32_t kTmpfs = 0x01021994, kRamfs = 0x858458F6;
constexpr KnownFileSystem kFileSystems[] = {
    {kTmpfs, "tmpfs"},       {kRamfs, "ramfs"},     {0xEF53, "ext4"},
    {0x58465342, "xfs"},     {0x9123683E, "btrfs"}, {0xF2F52010, "f2fs"},
    {0x794C7630, "overlay"}, {0x2FC12FC1, "zfs"},   {0x6969, "nfs"},
    {0xFF534D42, "cifs"},    {0xFE534D42, "smb2"},  {0x65735546, "fuse"},
    {0x01021997, "9p"},      {0x4D44, "vfat"},      {0x2011BAB0, "exfat"}};

uint32_t MagicOf(int file) {
  struct statfs info;
  return fstatfs(file, &info) == 0 ? static_cast<uint32_t>(info.f_type) : 0;
}

}  // namespace

std::string FileName::Text() const {
  return StrCat(name.Hex(), "-", parent.Hex(), "-", end, "-", Hex(salt), "-",
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
  // Capital letters are another name to a reader.
  const auto is_capital = [](char c) { return c >= 'A' && c <= 'F'; };
  for (const std::string_view part : parts) {
    if (std::any_of(part.begin(), part.end(), is_capital)) return std::nullopt;
  }
  return result;
}

std::string Folder::SubfolderName(size_t i) {
  const auto byte = static_cast<uint8_t>(i);
  return Hex({&byte, 1});
}

std::shared_ptr<const Folder> Folder::Open(const std::string& given,
                                           bool make) {
  const std::string path = WithoutSlash(given);
  if (path.empty()) throw InvalidArgument("a folder's path is empty");
  constexpr int kTries = 20;
  for (int tries = 1;; ++tries) {
    try {
      if (make) MakeFolder(path);
      Descriptor descriptor = OpenFolder(AT_FDCWD, path.c_str());
      if (!descriptor.is_open()) ThrowUnopened(path, errno);
      CheckOwner(path, descriptor.get());
      const std::shared_ptr<Folder> folder(new Folder(std::move(descriptor)));
      folder->FindKey(path, make);
      return folder;
    } catch (const IoError& error) {
      // Somebody deletes it at this moment.
      if (!make || error.error_number() != ENOENT || tries == kTries) throw;
    }
  }
}

Folder::KeyState Folder::ReadKey() {
  const Descriptor file(Uninterrupted([&] {
    return openat(descriptor_.get(), kKeyName,
                  O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  }));
  if (!file.is_open()) {
    return errno == ENOENT ? KeyState::kMissing : KeyState::kBad;
  }
  struct stat info;
  const bool sound = fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode) &&
                     info.st_uid == geteuid() && (info.st_mode & 0277) == 0 &&
                     info.st_size == static_cast<off_t>(key_.size()) &&
                     ReadFileAt(file.get(), 0, key_) == 0;
  return sound ? KeyState::kRead : KeyState::kBad;
}

void Folder::FindKey(const std::string& path, bool make) {
  const std::string key_path = path + "/" + kKeyName;
  KeyState state = ReadKey();
  std::optional<Descriptor> lock;
  if (state == KeyState::kBad && make) {
    // It was torn, or is a stranger's. One process at a time puts it right: no
    // other one's new key goes.
    lock.emplace(OpenLock());
    constexpr int kTries = 500;
    for (int i = 0; TryLock(lock->get(), true) == LockResult::kTaken; ++i) {
      if (i == kTries) throw IoError(path + "/" + kLockName, EAGAIN);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    state = ReadKey();
    if (state == KeyState::kBad &&
        unlinkat(descriptor_.get(), kKeyName, 0) != 0 && errno != ENOENT) {
      throw IoError(key_path, errno);
    }
  }
  if (state != KeyState::kRead && make) {
    CheckNothingElse(path);
    std::array<uint64_t, 4> random;
    for (uint64_t& part : random) part = RandomSeed();
    const int error =
        FaultAt("key") != 0
            ? EIO
            : PublishIn(descriptor_.get(), kKeyName, AsBytes(random), true);
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
  struct stat here, there;
  if (lstat(WithoutSlash(path).c_str(), &there) != 0) return Place::kGone;
  return fstat(descriptor_.get(), &here) == 0 && here.st_dev == there.st_dev &&
                 here.st_ino == there.st_ino
             ? Place::kHere
             : Place::kOther;
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

Descriptor Folder::OpenSubfolder(const std::string& name, bool make) const {
  Descriptor folder = OpenFolder(descriptor_.get(), name.c_str());
  if (folder.is_open() || errno != ENOENT || !make) return folder;
  if (mkdirat(descriptor_.get(), name.c_str(), 0700) != 0 && errno != EEXIST) {
    return folder;
  }
  (void)FaultAt("subfolder-done");
  return OpenFolder(descriptor_.get(), name.c_str());
}

Descriptor Folder::OpenObject(const FileName& name) const {
  const std::string path = name.Path();
  const auto open_it = [&](int more) {
    return Uninterrupted([&] {
      return openat(descriptor(), path.c_str(),
                    O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | more);
    });
  };
  const int file = open_it(O_NOATIME);
  return Descriptor(file < 0 && errno == EPERM ? open_it(0) : file);
}

Descriptor Folder::OpenLock() const {
  return Descriptor(Uninterrupted([&] {
    return openat(descriptor_.get(), kLockName,
                  O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  }));
}

int Folder::Publish(const FileName& name,
                    std::span<const uint8_t> bytes) const noexcept {
  try {
    const std::string folder_name = name.Subfolder();
    int error = 0;
    // A folder that somebody deletes at this moment is made again.
    for (int i = 0; i < 3; ++i) {
      const Descriptor folder = OpenSubfolder(folder_name, true);
      error = folder.is_open()
                  ? PublishIn(folder.get(), name.Text(), bytes, false)
                  : errno;
      if (error != ENOENT) break;
    }
    return error;
  } catch (const std::exception&) {
    return ENOMEM;
  }
}

int Folder::PublishIn(int folder, const std::string& name,
                      std::span<const uint8_t> bytes, bool durable) const {
  struct stat info;
  if (fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    return EEXIST;
  }
  if (!MayBeWritten(bytes.size())) return EFBIG;
  std::string temporary;
  const auto open_temporary = [&] {
    if (!named_only_) {
      const int file =
          FaultAt("unnamed") != 0
              ? (errno = EOPNOTSUPP, -1)
              : Uninterrupted([&] {
                  return openat(folder, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC,
                                0400);
                });
      if (file >= 0 ||
          (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) {
        return file;
      }
    }
    const uint64_t random = RandomSeed();
    temporary = StrCat(kTemporaryPrefix, Hex(AsBytes(std::span(&random, 1))));
    return Uninterrupted([&] {
      return openat(folder, temporary.c_str(),
                    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0400);
    });
  };
  const Descriptor file(open_temporary());
  if (!file.is_open()) return errno;
  int error = FaultAt("opened");
  // Where locks do not work, nobody takes the file for a dead one's.
  if (!temporary.empty()) (void)TryLock(file.get(), true);
  if (error == 0) {
    const size_t half = bytes.size() / 2;
    error = WriteFileAt(file.get(), 0, bytes.first(half));
    if (error == 0) error = FaultAt("half-written");
    if (error == 0) error = WriteFileAt(file.get(), half, bytes.subspan(half));
  }
  if (error == 0 && durable && fsync(file.get()) != 0) error = errno;
  if (error == 0) error = FaultAt("written");
  if (error == 0) {
    error = temporary.empty() ? LinkUnnamed(file.get(), folder, name)
                              : LinkNamed(folder, temporary, name);
    if (error == ENOENT && temporary.empty() && !IsUnlinked(folder)) {
      named_only_ = true;
    }
  }
  if (error != 0 && !temporary.empty()) {
    unlinkat(folder, temporary.c_str(), 0);
  }
  (void)FaultAt("linked");
  return error;
}

LockResult TryLock(int file, bool exclusive) noexcept {
  struct flock lock = {};
  lock.l_type = static_cast<short>(exclusive ? F_WRLCK : F_RDLCK);
  lock.l_whence = SEEK_SET;
  if (Uninterrupted([&] { return fcntl(file, F_OFD_SETLK, &lock); }) == 0) {
    return LockResult::kHeld;
  }
  return errno == EAGAIN || errno == EACCES ? LockResult::kTaken
                                            : LockResult::kImpossible;
}

std::string FileSystemName(int file) {
  const uint32_t magic = MagicOf(file);
  for (const KnownFileSystem& known : kFileSystems) {
    if (known.magic == magic) return known.name;
  }
  char text[16];
  std::snprintf(text, sizeof(text), "0x%x", magic);
  return text;
}

bool IsInMemory(int file) {
  const uint32_t magic = MagicOf(file);
  return magic == kTmpfs || magic == kRamfs;
}

}  // namespace gkv
