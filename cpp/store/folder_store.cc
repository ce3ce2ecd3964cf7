#include "store/folder_store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fault.h"
#include "base/mutex.h"
#include "base/own_process.h"
#include "base/process.h"
#include "base/time.h"
#include "store/folder.h"
#include "store/object.h"

namespace gkv {
namespace {

using Clock = std::chrono::steady_clock;

// a sweep after 1/16 of the budget was written
constexpr uint64_t kSweepShare = 16;
constexpr size_t kMaxMappings = 4096;
constexpr size_t kMaxKnown = 65'536;
constexpr int64_t kTouchNs = 60 * kSecondNs;
constexpr auto kLookAgain = std::chrono::milliseconds(250);
constexpr auto kFirstPause = std::chrono::milliseconds(250);
constexpr auto kLongestPause = std::chrono::seconds(64);
constexpr uint64_t kLeastObject = 192;  // a head without tokens
constexpr uint64_t kSizeAt = 16;        // offset of an object's size

// A mapped object, which readers may keep longer than the store lives. `count`
// says how many there are.
class MappedObject {
 public:
  using Count = std::shared_ptr<std::atomic<size_t>>;

  MappedObject(Mapping mapping, const FileInfo& info, std::string path,
               Count count)
      : mapping_(std::move(mapping)),
        info_(info),
        path_(std::move(path)),
        count_(std::move(count)) {
    ++*count_;
  }
  ~MappedObject() { --*count_; }
  MappedObject(const MappedObject&) = delete;

  std::span<const uint8_t> bytes() const { return mapping_.bytes(); }
  const FileInfo& info() const { return info_; }  // when it was mapped
  const std::string& path() const { return path_; }

 private:
  const Mapping mapping_;
  const FileInfo info_;
  const std::string path_;  // relative to the folder
  const Count count_;
};

// A file whose content was checked in this process.
struct CheckedFile {
  FileInfo info;  // when it was checked
  Address address;
  std::weak_ptr<const MappedObject> mapping;
};

enum class Verdict {
  kSound,
  kOther,    // sound, and of another address with the same name
  kDamaged,  // its hashes are wrong, or it has another's name
};

Verdict Check(const Folder& folder, const ObjectKey& key,
              std::span<const uint8_t> bytes, Address& address) {
  try {
    const ObjectHead head = ReadHead(bytes);
    address = AddressOf(head);
    if (address == key.address && head.kind == key.kind &&
        head.salt == key.salt) {
      return Verdict::kSound;
    }
  } catch (const Error&) {
    return Verdict::kDamaged;
  }
  return address != key.address && folder.NameOfAddress(address) ==
                                       folder.NameOfAddress(key.address)
             ? Verdict::kOther
             : Verdict::kDamaged;
}

class FolderStoreOnFiles final : public FolderStore {
 public:
  FolderStoreOnFiles(std::string path, const FolderOptions& options,
                     uint64_t budget_bytes,
                     std::shared_ptr<const Folder> folder)
      : path_(std::move(path)),
        tier_(options.tier),
        mapped_(options.mapped),
        budget_bytes_(budget_bytes),
        folder_(std::move(folder)) {}

  std::string_view tier() const override { return tier_; }
  uint64_t budget_bytes() const override { return budget_bytes_; }

  void Has(std::span<const ObjectKey> keys,
           std::span<uint8_t> found) noexcept override;
  std::vector<Loaded> Load(std::span<const ObjectKey> keys) override;
  void Put(const ObjectKey& key, StoredBytes object) override;
  void Remove(std::span<const ObjectKey> keys) noexcept override;
  uint64_t RemoveBranch(const ObjectBranch& branch) noexcept override;
  void Damaged(const ObjectKey& key) noexcept override;
  void Flush() noexcept override {}  // Put has written
  Cleared Clear(const Address* salt) noexcept override;
  StoreStats stats() const override;
  SweepResult Sweep() override;

 private:
  // Returns the folder that the path leads to, looked up now and then. For a
  // writer it is made again if it is gone; null if that fails.
  std::shared_ptr<const Folder> Current(bool writing, bool look = false);
  Loaded LoadOne(const Folder& folder, const ObjectKey& key);
  std::optional<StoredBytes> Map(const Folder& folder, const ObjectKey& key,
                                 const FileName& name, const File& file,
                                 const FileInfo& info, Verdict& verdict);
  std::optional<StoredBytes> Read(const Folder& folder, const ObjectKey& key,
                                  const File& file, const FileInfo& info,
                                  Verdict& verdict);
  bool Unlink(const Folder& folder, const FileName& name) noexcept;
  void Reject(const Folder& folder, const FileName& name) noexcept;
  uint64_t PinnedBytes(const Folder& folder);
  void TryToSweep() noexcept;
  // Whether `size` bytes leave free what is reserved for others. If they do
  // not, older objects are removed first.
  bool MakeRoom(const Folder& folder, uint64_t size) noexcept;
  bool IsPaused() const REQUIRES(mutex_);

  const std::string path_;
  const std::string tier_;
  const bool mapped_;
  const uint64_t budget_bytes_;
  const MappedObject::Count mappings_ =
      std::make_shared<std::atomic<size_t>>(0);

  Mutex sweeping_{AtFork::kLeaves};  // held by a sweep of this process
  const OwnProcess process_;
  mutable Mutex mutex_{AtFork::kWaits};
  std::shared_ptr<const Folder> folder_ GUARDED_BY(mutex_);
  Clock::time_point looked_ GUARDED_BY(mutex_) = Clock::now();
  std::map<ObjectName, CheckedFile> checked_ GUARDED_BY(mutex_);
  // And dead ones.
  std::vector<std::weak_ptr<const MappedObject>> live_ GUARDED_BY(mutex_);
  // Entries and bytes are those of the folder.
  mutable bool counted_ GUARDED_BY(mutex_) = false;
  mutable StoreStats stats_ GUARDED_BY(mutex_);
  uint64_t written_since_sweep_ GUARDED_BY(mutex_) = 0;
  bool swept_once_ GUARDED_BY(mutex_) = false;
  Clock::duration pause_ GUARDED_BY(mutex_){};
  Clock::time_point paused_until_ GUARDED_BY(mutex_){};
};

std::shared_ptr<const Folder> FolderStoreOnFiles::Current(bool writing,
                                                          bool look) {
  std::shared_ptr<const Folder> known;
  {
    const MutexLock lock(mutex_);
    const auto now = Clock::now();
    if (!look && now - looked_ < kLookAgain) return folder_;
    looked_ = now;
    known = folder_;
  }
  // No lock is held while a file system is called: it may not answer.
  const Folder::Place place = known->PlaceOf(path_);
  if (place == Folder::Place::kHere ||
      (place == Folder::Place::kGone && !writing)) {
    return known;
  }
  std::shared_ptr<const Folder> found;
  try {
    found = Folder::Open(path_, writing);
  } catch (const std::exception&) {
    // A symbolic link or a stranger's folder: readers keep the old one.
    return writing ? nullptr : known;
  }
  if (tier_ == "shared" && !found->directory().GetFileSystem().is_in_memory) {
    return writing ? nullptr : known;
  }
  const MutexLock lock(mutex_);
  // Another thread may have found it first.
  if (folder_ != known) return folder_;
  // Another folder has another key: nothing is known of its files.
  folder_ = std::move(found);
  checked_.clear();
  counted_ = false;
  return folder_;
}

void FolderStoreOnFiles::Has(std::span<const ObjectKey> keys,
                             std::span<uint8_t> found) noexcept {
  try {
    const auto folder = Current(false);
    for (size_t i = 0; i < keys.size(); ++i) {
      const std::string path = folder->NameFor(keys[i]).Path();
      found[i] = folder->directory().InfoOf(path).has_value();
    }
  } catch (const std::exception&) {
    std::fill(found.begin(), found.end(), uint8_t{0});
  }
}

std::vector<Loaded> FolderStoreOnFiles::Load(std::span<const ObjectKey> keys) {
  const auto folder = Current(false);
  std::vector<Loaded> loaded(keys.size());
  uint64_t hits = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    try {
      loaded[i] = LoadOne(*folder, keys[i]);
    } catch (const std::bad_alloc&) {
      loaded[i] = {};  // no memory for it: a miss
    }
    hits += loaded[i].state == LoadState::kHit;
  }
  const MutexLock lock(mutex_);
  stats_.hits += hits;
  stats_.misses += keys.size() - hits;
  return loaded;
}

Loaded FolderStoreOnFiles::LoadOne(const Folder& folder, const ObjectKey& key) {
  const FileName name = folder.NameFor(key);
  const File file = folder.directory().OpenUnnoticed(name.Path());
  if (!file.is_open()) {
    // None of this user's own files is a link, a socket or unreadable.
    if (errno == ELOOP || errno == ENXIO || errno == EACCES) {
      Reject(folder, name);
    }
    return {};
  }
  const auto info = file.Info();
  if (!info) return {};
  if (info->kind != FileInfo::Kind::kRegular || info->owner != UserId() ||
      (info->mode & 0222) != 0 || info->size < kLeastObject) {
    Reject(folder, name);
    return {};
  }
  // Checked before memory is allocated: the file may be cut, or too large.
  uint64_t said = 0;
  const int error = file.ReadAt(
      kSizeAt, {reinterpret_cast<uint8_t*>(&said), sizeof(said)});
  if (error != 0 || said != info->size) {
    if (error == 0 || error == EIO) Reject(folder, name);
    return {};
  }
  // It may be from a process with a larger budget.
  if (info->size > budget_bytes_) return {};
  Verdict verdict = Verdict::kSound;
  auto object = mapped_ ? Map(folder, key, name, file, *info, verdict)
                        : Read(folder, key, file, *info, verdict);
  if (verdict == Verdict::kDamaged) Reject(folder, name);
  if (!object) return {};
  const int64_t now = WallClockNs();
  const int64_t age = now - info->used_ns;
  if (age < 0 || age >= kTouchNs) {
    (void)FaultAt("touch");
    (void)file.SetUsed(now);  // it may fail: the file may not be writable
  }
  return {LoadState::kHit, *std::move(object)};
}

std::optional<StoredBytes> FolderStoreOnFiles::Map(const Folder& folder,
                                                   const ObjectKey& key,
                                                   const FileName& name,
                                                   const File& file,
                                                   const FileInfo& info,
                                                   Verdict& verdict) {
  const auto as_object = [](std::shared_ptr<const MappedObject> mapping) {
    const auto bytes = mapping->bytes();
    return StoredBytes{bytes, std::move(mapping), true, true};
  };
  bool checked = false;
  {
    const MutexLock lock(mutex_);
    const auto known = checked_.find(name.name);
    if (known != checked_.end() && known->second.info.HasSameContent(info)) {
      if (known->second.address != key.address) return std::nullopt;
      checked = true;
      if (auto mapping = known->second.mapping.lock()) {
        return as_object(std::move(mapping));
      }
    }
  }
  if (*mappings_ >= kMaxMappings) return std::nullopt;
  Mapping mapped = file.Map(static_cast<size_t>(info.size));
  if (mapped.bytes().empty()) return std::nullopt;
  auto mapping = std::make_shared<const MappedObject>(std::move(mapped), info,
                                                      name.Path(), mappings_);
  Address address = key.address;
  if (!checked) verdict = Check(folder, key, mapping->bytes(), address);
  if (verdict == Verdict::kDamaged) return std::nullopt;
  const MutexLock lock(mutex_);
  CheckedFile& known = checked_[name.name];
  if (known.info.HasSameContent(info)) {
    // Another thread was quicker.
    if (auto theirs = known.mapping.lock()) mapping = std::move(theirs);
  }
  known = {info, address, mapping};
  if (verdict == Verdict::kOther) return std::nullopt;
  if (live_.size() >= 2 * kMaxMappings) {
    std::erase_if(live_, [](const auto& one) { return one.expired(); });
  }
  live_.push_back(mapping);
  if (checked_.size() > kMaxKnown) {
    std::erase_if(checked_,
                  [](const auto& one) { return one.second.mapping.expired(); });
  }
  return as_object(std::move(mapping));
}

std::optional<StoredBytes> FolderStoreOnFiles::Read(const Folder& folder,
                                                    const ObjectKey& key,
                                                    const File& file,
                                                    const FileInfo& info,
                                                    Verdict& verdict) {
  const auto buffer =
      std::make_shared<AlignedBuffer<uint8_t>>(static_cast<size_t>(info.size));
  const int error = file.ReadAt(0, {buffer->data(), buffer->size()});
  if (error != 0) {
    if (error == EIO)
      verdict = Verdict::kDamaged;  // a bad sector, or a cut file
    return std::nullopt;
  }
  Address address;
  verdict = Check(folder, key, {buffer->data(), buffer->size()}, address);
  if (verdict != Verdict::kSound) return std::nullopt;
  return StoredBytes{{buffer->data(), buffer->size()}, buffer, false, true};
}

void FolderStoreOnFiles::Put(const ObjectKey& key, StoredBytes object) {
  const uint64_t size = object.bytes.size();
  {
    const MutexLock lock(mutex_);
    if (IsPaused() || CountedBytes(size) > budget_bytes_ - budget_bytes_ / 10) {
      ++stats_.failed_writes;
      return;
    }
  }
  auto folder = Current(true);
  const auto publish = [&] {
    if (!folder) return ENOENT;
    if (!MakeRoom(*folder, CountedBytes(size))) return ENOSPC;
    return folder->Publish(folder->NameFor(key), object.bytes);
  };
  int error = publish();
  if (error == ENOENT) {
    folder = Current(true, true);
    error = publish();
  }
  bool sweep = false;
  {
    const MutexLock lock(mutex_);
    if (error == 0 || error == EEXIST) {
      pause_ = {};
    } else {
      ++stats_.failed_writes;
    }
    // A file in the place of one subfolder is no failure of the medium.
    if (error != 0 && error != EEXIST && error != ENOTDIR && error != ELOOP) {
      pause_ = pause_ == Clock::duration{}
                   ? Clock::duration(kFirstPause)
                   : std::min<Clock::duration>(2 * pause_, kLongestPause);
      paused_until_ = Clock::now() + pause_;
    }
    if (error == 0) {
      ++stats_.writes;
      ++stats_.entries;
      stats_.bytes += size;
      written_since_sweep_ += CountedBytes(size);
      sweep =
          !swept_once_ || written_since_sweep_ >= budget_bytes_ / kSweepShare;
    }
  }
  if (sweep) TryToSweep();
}

bool FolderStoreOnFiles::MakeRoom(const Folder& folder,
                                  uint64_t size) noexcept {
  const auto has_room = [&] {
    const FileSystemRoom room = RoomOf(folder);
    return room.free_bytes >= room.reserved_bytes &&
           room.free_bytes - room.reserved_bytes >= size;
  };
  if (has_room()) return true;
  TryToSweep();
  return has_room();
}

bool FolderStoreOnFiles::IsPaused() const {
  return pause_ != Clock::duration{} && Clock::now() < paused_until_;
}

bool FolderStoreOnFiles::Unlink(const Folder& folder,
                                const FileName& name) noexcept {
  try {
    const std::string path = name.Path();
    const auto info = folder.directory().InfoOf(path);
    if (folder.directory().Remove(path) != 0) return false;
    const MutexLock lock(mutex_);
    if (stats_.entries > 0) --stats_.entries;
    if (info && info->kind == FileInfo::Kind::kRegular) {
      stats_.bytes -= std::min(stats_.bytes, info->size);
    }
    checked_.erase(name.name);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void FolderStoreOnFiles::Reject(const Folder& folder,
                                const FileName& name) noexcept {
  Unlink(folder, name);
  const MutexLock lock(mutex_);
  ++stats_.damaged;
}

void FolderStoreOnFiles::Remove(std::span<const ObjectKey> keys) noexcept {
  try {
    const auto folder = Current(false);
    for (const ObjectKey& key : keys) Unlink(*folder, folder->NameFor(key));
  } catch (const std::exception&) {
    // Out of memory: they are removed when they are old.
  }
}

uint64_t FolderStoreOnFiles::RemoveBranch(
    const ObjectBranch& branch) noexcept {
  try {
    const uint64_t removed = RemoveBranchOf(*Current(false), branch);
    const MutexLock lock(mutex_);
    counted_ = false;
    checked_.clear();
    return removed;
  } catch (const std::exception&) {
    return 0;  // out of memory: it is removed when it is old
  }
}

void FolderStoreOnFiles::Damaged(const ObjectKey& key) noexcept {
  try {
    const auto folder = Current(false);
    {
      const MutexLock lock(mutex_);
      checked_.erase(folder->NameFor(key).name);
    }
    // Checks the object again, and removes it if it is not sound.
    LoadOne(*folder, key);
  } catch (const std::exception&) {
    // Out of memory: the next reader finds out.
  }
}

Cleared FolderStoreOnFiles::Clear(const Address* salt) noexcept {
  try {
    const bool all = ClearFolder(*Current(false), salt);
    const MutexLock lock(mutex_);
    counted_ = false;
    checked_.clear();
    return all ? Cleared::kAll : Cleared::kFailed;
  } catch (const std::exception&) {
    return Cleared::kFailed;  // out of memory: nothing went, or a part
  }
}

StoreStats FolderStoreOnFiles::stats() const {
  MutexLock lock(mutex_);
  if (!counted_) {
    const auto folder = folder_;
    lock.Unlock();
    FolderContent content;
    bool read = false;
    try {
      content = ReadFolder(*folder);
      read = true;
    } catch (const std::exception&) {
      // Out of memory: the counts are those that are known.
    }
    lock.Lock();
    if (read && folder == folder_) {
      stats_.entries = content.entries.size();
      stats_.bytes = content.bytes;
      counted_ = true;
    }
  }
  StoreStats stats = stats_;
  stats.paused = IsPaused();
  return stats;
}

// Returns the bytes of files that were removed and still take memory because
// this process has them mapped.
uint64_t FolderStoreOnFiles::PinnedBytes(const Folder& folder) {
  std::vector<std::shared_ptr<const MappedObject>> live;
  {
    const MutexLock lock(mutex_);
    for (const auto& one : live_) {
      if (auto mapping = one.lock()) live.push_back(std::move(mapping));
    }
  }
  std::sort(live.begin(), live.end());
  live.erase(std::unique(live.begin(), live.end()), live.end());
  uint64_t bytes = 0;
  for (const auto& mapping : live) {
    const auto info = folder.directory().InfoOf(mapping->path());
    if (!info || !info->HasSameContent(mapping->info())) {
      bytes += CountedBytes(mapping->bytes().size());
    }
  }
  return bytes;
}

SweepResult FolderStoreOnFiles::Sweep() {
  // In a child of fork() a thread of the parent may hold it; between processes
  // the folder has a lock of its own.
  std::optional<MutexLock> one_at_a_time;
  if (!process_.InChild()) one_at_a_time.emplace(sweeping_);
  const auto folder = Current(false);
  uint64_t written = 0;
  {
    const MutexLock lock(mutex_);
    written = written_since_sweep_;
  }
  const SweepResult result =
      SweepFolder(*folder, budget_bytes_, PinnedBytes(*folder));
  const MutexLock lock(mutex_);
  // If another process has the lock, it sweeps in place of this one.
  written_since_sweep_ -= std::min(written, written_since_sweep_);
  swept_once_ = true;
  if (!result.swept) return result;
  stats_.evictions += result.removed;
  stats_.entries = result.entries;
  stats_.bytes = result.bytes;
  counted_ = true;
  return result;
}

void FolderStoreOnFiles::TryToSweep() noexcept {
  try {
    Sweep();
  } catch (const std::exception&) {
    // Out of memory: the next sweep tries again.
  }
}

// Returns the folder, or the one in which it would be made; not open if that
// cannot be opened.
Directory PlaceOf(const std::string& path) {
  std::string place = path;
  std::error_code error;
  while (!place.empty() && !std::filesystem::exists(place, error)) {
    const size_t slash = place.find_last_of('/');
    if (slash == std::string::npos) place = ".";
    else place.resize(slash == 0 && place.size() > 1 ? 1 : slash);
  }
  return Directory::Working().OpenDirectory(place, true);
}

void CheckInMemory(const std::string& path, const FileSystem& system) {
  if (system.is_in_memory) return;
  throw InvalidArgument(StrCat(path, " is on a file system of type ",
                               system.name,
                               ", expected one in memory (tmpfs), as "
                               "/dev/shm"));
}

}  // namespace

std::shared_ptr<FolderStore> OpenFolderStore(const std::string& path,
                                             const FolderOptions& options) {
  ReadFault();
  const bool shared = options.tier == "shared";
  if (!shared && options.tier != "disk") {
    throw InvalidArgument(Unexpected("tier", "\"shared\" or \"disk\"",
                                     StrCat("\"", options.tier, "\"")));
  }
  if (options.mapped && !shared) {
    throw InvalidArgument(
        "mapped: expected false for the tier \"disk\", where a bad sector of a "
        "mapped file ends the process, found true");
  }
  if (options.budget_bytes == 0) {
    throw InvalidArgument(Unexpected("budget_bytes", "at least 1", 0));
  }
  if (shared) {
    // Checked before the folder is made in vain.
    const Directory place = PlaceOf(path);
    if (place.is_open()) CheckInMemory(path, place.GetFileSystem());
  }
  auto folder = Folder::Open(path, true);
  uint64_t budget = options.budget_bytes;
  if (shared) {
    const FileSystem system = folder->directory().GetFileSystem();
    CheckInMemory(path, system);
    uint64_t limit = MemoryLimit();
    if (system.bytes > 0) limit = std::min(limit, system.bytes);
    budget = std::min(budget, limit / 2);
  }
  return std::make_shared<FolderStoreOnFiles>(path, options, budget,
                                              std::move(folder));
}

FolderReport DescribeFolder(const std::string& path) {
  const auto folder = Folder::Open(path, false);
  const FolderContent content = ReadFolder(*folder);
  FolderReport report;
  report.file_system = folder->directory().GetFileSystem().name;
  report.temporary_files = content.temporary.size();
  using GroupKey = std::pair<std::array<uint8_t, 8>, ObjectKind>;
  std::map<GroupKey, FolderReport::Group> groups;
  for (const FolderEntry& entry : content.entries) {
    auto& group = groups[{entry.name.salt, entry.name.kind}];
    ++group.entries;
    group.bytes += entry.bytes;
    report.oldest_ns = report.oldest_ns == 0
                           ? entry.used_ns
                           : std::min(report.oldest_ns, entry.used_ns);
    report.newest_ns = std::max(report.newest_ns, entry.used_ns);
  }
  for (auto& [key, group] : groups) {
    std::tie(group.salt, group.kind) = key;
    report.groups.push_back(group);
  }
  return report;
}

}  // namespace gkv
