#include "store/folder_sweep.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/fault.h"
#include "base/rounding.h"
#include "base/time.h"
#include "store/object.h"

namespace gkv {
namespace {

constexpr uint64_t kMemoryPage = 4096;
constexpr int64_t kDayNs = 86'400'000'000'000;
constexpr int kSubfolders = 256;
constexpr uint64_t kReservedShare = 32;
constexpr uint64_t kMostReserved = uint64_t{256} << 20;
// No head is longer: it has at most 256 tokens and a few ranges.
constexpr uint64_t kMostHeadBytes = 4096;

void ReadSubfolder(const Folder& folder, const std::string& subfolder,
                   int64_t now, FolderContent& content) {
  const Directory directory = folder.OpenSubfolder(subfolder, false);
  if (!directory.is_open()) return;
  directory.VisitFiles([&](std::string_view text, const FileInfo& info) {
    if (text.starts_with(kTemporaryPrefix)) {
      content.temporary.push_back(subfolder + "/" + std::string(text));
      return;
    }
    const auto name = FileName::Parse(text);
    if (!name || name->Subfolder() != subfolder) return;
    const int64_t used = std::max(info.used_ns, info.written_ns);
    content.entries.push_back({*name, info.size, std::min(used, now),
                               std::max<int64_t>(used - now, 0)});
    content.bytes += info.size;
  });
}

// The tree of objects that hang on each other.
class Tree {
 public:
  explicit Tree(const std::vector<FolderEntry>& entries)
      : entries_(entries), children_(entries.size()) {
    for (size_t i = 0; i < entries.size(); ++i) {
      by_name_.emplace(entries[i].name.name, i);
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].name.HangsOnObject()) {
        hanging_.emplace(entries[i].name.parent, i);
        if (const auto at = ParentOf(i)) ++children_[*at];
      }
    }
  }

  std::optional<size_t> ParentOf(size_t i) const {
    if (!entries_[i].name.HangsOnObject()) return std::nullopt;
    const auto at = by_name_.find(entries_[i].name.parent);
    if (at == by_name_.end()) return std::nullopt;
    return at->second;
  }
  size_t children(size_t i) const { return children_[i]; }
  // Notes that a child was removed. Returns true if none is left.
  bool DropChild(size_t i) { return --children_[i] == 0; }

  // Says for each object whether its parents are there up to a root.
  std::vector<bool> Rooted() const {
    std::vector<bool> rooted(entries_.size());
    std::vector<size_t> open;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (!entries_[i].name.HangsOnObject()) open.push_back(i);
    }
    while (!open.empty()) {
      const size_t i = open.back();
      open.pop_back();
      if (rooted[i]) continue;
      rooted[i] = true;
      const auto [begin, end] = hanging_.equal_range(entries_[i].name.name);
      for (auto at = begin; at != end; ++at) open.push_back(at->second);
    }
    return rooted;
  }

 private:
  const std::vector<FolderEntry>& entries_;
  std::vector<size_t> children_;
  std::map<ObjectName, size_t> by_name_;
  std::multimap<ObjectName, size_t> hanging_;
};

// Reads the subfolders of missing parents again: a parent may have been
// published after its subfolder was read and before the child's was. Returns
// true if it found any.
bool ReadMissingParents(const Folder& folder, int64_t now,
                        FolderContent& content) {
  std::set<ObjectName> names;
  for (const FolderEntry& entry : content.entries) {
    names.insert(entry.name.name);
  }
  std::set<uint8_t> subfolders;
  for (const FolderEntry& entry : content.entries) {
    if (entry.name.HangsOnObject() && !names.contains(entry.name.parent)) {
      subfolders.insert(entry.name.parent.bytes[0]);
    }
  }
  std::set<FileName> known;
  for (const FolderEntry& entry : content.entries) known.insert(entry.name);
  FolderContent again;
  for (const uint8_t i : subfolders) {
    ReadSubfolder(folder, Folder::SubfolderName(i), now, again);
  }
  bool found = false;
  for (FolderEntry& entry : again.entries) {
    if (!known.insert(entry.name).second) continue;
    content.bytes += entry.bytes;
    content.entries.push_back(std::move(entry));
    found = true;
  }
  return found;
}

// Corrects times that are later than now, from a clock that was ahead. Until
// then these objects would be the newest, and objects that are used meanwhile
// would be removed before them. They get the present time, in the order that
// they had.
void EndTimesAhead(const Folder& folder, int64_t now,
                   std::vector<FolderEntry>& entries) {
  std::vector<FolderEntry*> ahead;
  for (FolderEntry& entry : entries) {
    if (entry.ahead_ns > 0) ahead.push_back(&entry);
  }
  std::sort(ahead.begin(), ahead.end(),
            [](const FolderEntry* a, const FolderEntry* b) {
              return a->ahead_ns < b->ahead_ns;
            });
  int64_t used = now - static_cast<int64_t>(ahead.size());
  for (FolderEntry* const entry : ahead) {
    entry->used_ns = ++used;
    entry->ahead_ns = 0;
    // It may fail: the file may not be writable.
    (void)folder.directory().SetTimes(entry->name.Path(), used);
  }
}

// Whether the writer of a temporary file is dead: it holds a lock while it
// lives.
bool IsDead(const Folder& folder, const std::string& path, int64_t now) {
  const File file = folder.directory().OpenToRead(path);
  const auto info = file.Info();
  if (!info) return false;
  const LockResult lock = file.TryLock(false);
  return lock == LockResult::kHeld || (lock == LockResult::kImpossible &&
                                       info->written_ns + kDayNs < now);
}

}  // namespace

uint64_t CountedBytes(uint64_t bytes) {
  return bytes > UINT64_MAX - kMemoryPage ? bytes : RoundUp(bytes, kMemoryPage);
}

uint64_t FolderContent::CountedBytes() const {
  uint64_t counted = 0;
  for (const FolderEntry& entry : entries) {
    counted += gkv::CountedBytes(entry.bytes);
  }
  return counted;
}

FolderContent ReadFolder(const Folder& folder) {
  FolderContent content;
  const int64_t now = WallClockNs();
  folder.directory().VisitFiles([&](std::string_view text, const FileInfo&) {
    if (text.starts_with(kTemporaryPrefix)) {
      content.temporary.emplace_back(text);
    }
  });
  for (int i = 0; i < kSubfolders; ++i) {
    ReadSubfolder(folder, Folder::SubfolderName(static_cast<size_t>(i)), now,
                  content);
  }
  return content;
}

FileSystemRoom RoomOf(const Folder& folder) noexcept {
  const FileSystem system = folder.directory().GetFileSystem();
  if (system.bytes == 0) return {UINT64_MAX, 0};
  return {system.free_bytes,
          std::min(system.bytes / kReservedShare, kMostReserved)};
}

SweepResult SweepFolder(const Folder& folder, uint64_t budget_bytes,
                        uint64_t pinned_bytes) {
  SweepResult result;
  const File lock = folder.OpenLock();
  // Without locks, two sweeps at once do no harm either.
  if (lock.TryLock(true) == LockResult::kTaken) return result;
  (void)FaultAt("sweep-locked");
  result.swept = true;
  const int64_t now = WallClockNs();
  FolderContent content = ReadFolder(folder);
  for (const std::string& path : content.temporary) {
    if (IsDead(folder, path, now) && folder.directory().Remove(path) == 0) {
      ++result.removed_temporary;
    }
  }
  while (ReadMissingParents(folder, now, content)) {
  }
  EndTimesAhead(folder, now, content.entries);
  const std::vector<FolderEntry>& entries = content.entries;
  result.entries = entries.size();
  result.bytes = content.bytes;
  uint64_t counted = content.CountedBytes() + pinned_bytes;
  Tree tree(entries);
  const std::vector<bool> rooted = tree.Rooted();
  const auto remove = [&](size_t i) {
    const FolderEntry& entry = entries[i];
    (void)FaultAt("sweep-unlink");
    const int error = folder.directory().Remove(entry.name.Path());
    if (error != 0 && error != ENOENT) return;
    ++result.removed;
    result.removed_bytes += entry.bytes;
    --result.entries;
    result.bytes -= entry.bytes;
    counted -= CountedBytes(entry.bytes);
  };
  using Victim = std::pair<int64_t, size_t>;
  std::priority_queue<Victim, std::vector<Victim>, std::greater<>> leaves;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!rooted[i]) {
      remove(i);
    } else if (tree.children(i) == 0) {
      leaves.push({entries[i].used_ns, i});
    }
  }
  // Other files need room, too.
  const FileSystemRoom room = RoomOf(folder);
  if (room.free_bytes < budget_bytes) {
    const uint64_t all = counted + room.free_bytes;
    budget_bytes =
        std::min(budget_bytes, all - std::min(all, room.reserved_bytes));
  }
  const uint64_t target = budget_bytes - budget_bytes / 10;
  while (counted > target && !leaves.empty()) {
    const size_t i = leaves.top().second;
    leaves.pop();
    remove(i);
    const auto parent = tree.ParentOf(i);
    if (parent && tree.DropChild(*parent)) {
      leaves.push({entries[*parent].used_ns, *parent});
    }
  }
  return result;
}

namespace {

void EraseOtherSalts(const Address& salt, std::vector<FolderEntry>& entries) {
  std::erase_if(entries, [&](const FolderEntry& entry) {
    return !std::equal(entry.name.salt.begin(), entry.name.salt.end(),
                       salt.bytes.begin());
  });
}

// Returns the head of an object; none if it is gone or damaged.
std::optional<ObjectHead> HeadOf(const Folder& folder,
                                 const FolderEntry& entry) {
  const File file = folder.directory().OpenUnnoticed(entry.name.Path());
  if (!file.is_open()) return std::nullopt;
  std::vector<uint8_t> first(std::min(entry.bytes, kMostHeadBytes));
  if (file.ReadAt(0, first) != 0) return std::nullopt;
  try {
    return ReadHeadOf(first, entry.bytes);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool IsOf(const ObjectBranch& branch, const ObjectHead& head) {
  if (std::find(branch.pages.begin(), branch.pages.end(), head.parent) !=
      branch.pages.end()) {
    return true;
  }
  return head.parent == branch.parent && head.begin == branch.begin &&
         head.tokens.size() >= branch.tokens.size() &&
         std::equal(branch.tokens.begin(), branch.tokens.end(),
                    head.tokens.begin());
}

}  // namespace

uint64_t RemoveBranchOf(const Folder& folder, const ObjectBranch& branch) {
  FolderContent content = ReadFolder(folder);
  auto& entries = content.entries;
  EraseOtherSalts(branch.salt, entries);
  // A page comes before what hangs on it.
  std::sort(entries.begin(), entries.end(),
            [](const FolderEntry& a, const FolderEntry& b) {
              return std::pair(a.name.end, a.name.kind) <
                     std::pair(b.name.end, b.name.kind);
            });
  const ObjectName parent = folder.NameOfAddress(branch.parent);
  std::set<ObjectName> pages;  // that go
  std::vector<const FolderEntry*> victims;
  for (const FolderEntry& entry : entries) {
    const FileName& name = entry.name;
    bool goes = pages.contains(name.parent);
    if (!goes && (name.parent == parent || name.parent == ObjectName{})) {
      const auto head = HeadOf(folder, entry);
      goes = head && IsOf(branch, *head);
    }
    if (!goes) continue;
    victims.push_back(&entry);
    if (name.kind == ObjectKind::kPage) pages.insert(name.name);
  }
  uint64_t removed = 0;
  for (auto at = victims.rbegin(); at != victims.rend(); ++at) {
    const std::string path = (*at)->name.Path();
    (void)FaultAt("branch-unlink");
    removed += folder.directory().Remove(path) == 0;
  }
  return removed;
}

bool ClearFolder(const Folder& folder, const Address* salt) {
  FolderContent content = ReadFolder(folder);
  auto& entries = content.entries;
  if (salt != nullptr) EraseOtherSalts(*salt, entries);
  // Resume points, window pages, pages; the longest prefix first.
  std::sort(entries.begin(), entries.end(),
            [](const FolderEntry& a, const FolderEntry& b) {
              return std::pair(a.name.kind, a.name.end) >
                     std::pair(b.name.kind, b.name.end);
            });
  bool all = true;
  for (const FolderEntry& entry : entries) {
    (void)FaultAt("clear-unlink");
    const int error = folder.directory().Remove(entry.name.Path());
    all = all && (error == 0 || error == ENOENT);
  }
  return all;
}

}  // namespace gkv
