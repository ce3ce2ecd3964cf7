#include "store/folder_store.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "io/temp_folder.h"
#include "store/chain_objects.h"
#include "store/eventually.h"
#include "store/folder.h"
#include "store/folder_places.h"

namespace gkv {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLarge = 1 << 26;

void SetFault(const char* text) {
  if (text == nullptr) {
    unsetenv("GEMMAKV_FAULT");
  } else {
    setenv("GEMMAKV_FAULT", text, 1);
  }
  ReadFault();
}

std::vector<ObjectKey> KeysOf(const std::vector<ChainObject>& chain) {
  std::vector<ObjectKey> keys;
  for (auto at = chain.rbegin(); at != chain.rend(); ++at) {
    keys.push_back(at->key);
  }
  return keys;
}

void PutAll(BlockStore& store, const std::vector<ChainObject>& chain) {
  for (const ChainObject& object : chain) store.Put(object.key, object.bytes);
}

// How many of them are there; none has a wrong byte.
size_t HitsOf(BlockStore& store, const std::vector<ChainObject>& chain) {
  const auto loaded = store.Load(KeysOf(chain));
  size_t hits = 0;
  for (size_t i = 0; i < chain.size(); ++i) {
    const Loaded& one = loaded[chain.size() - 1 - i];
    if (one.state != LoadState::kHit) continue;
    ++hits;
    EXPECT_TRUE(SameBytes(one.object.bytes, chain[i].bytes.bytes));
  }
  return hits;
}

// Whether a thread of this process sleeps now.
bool Sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  return name_end != text.npos && text.compare(name_end, 3, ") S") == 0;
}

class FolderStoreTest : public testing::TestWithParam<bool> {
 protected:
  FolderStoreTest()
      : mapped_(GetParam()),
        above_(mapped_ ? InMemory() : OnDisk()),
        path_(above_ / "cache") {}
  ~FolderStoreTest() override { SetFault(nullptr); }

  FolderOptions Options(uint64_t budget = kLarge) const {
    return {mapped_ ? "shared" : "disk", mapped_, budget};
  }
  std::shared_ptr<FolderStore> Open(uint64_t budget = kLarge) const {
    return OpenFolderStore(path_, Options(budget));
  }
  std::string FileOf(const ChainObject& object) const {
    return gkv::FileOf(path_, object.key);
  }
  // What Open says.
  std::string Refusal() const {
    try {
      Open();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing";
  }
  uint64_t SizeOf(const std::vector<ChainObject>& chain) const {
    uint64_t size = 0;
    for (const auto& object : chain) {
      size += CountedBytes(object.bytes.bytes.size());
    }
    return size;
  }

  const bool mapped_;
  const FolderAt above_;
  const std::string path_;
};

INSTANTIATE_TEST_SUITE_P(Tiers, FolderStoreTest, testing::Bool(),
                         [](const auto& tier) {
                           return tier.param ? "Shared" : "Disk";
                         });

// A file system that does not answer holds up whoever asks it, and no fork().
TEST_P(FolderStoreTest, ForkDoesNotWaitForAFileSystem) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends it where fork() waits for the thread
    const auto store = OpenFolderStore(path_, Options());
    SetFault("folder-look:delay=600000");
    std::atomic<pid_t> asking = 0;
    std::thread([&] {
      asking = gettid();
      const std::vector<ObjectKey> keys(1);
      std::vector<uint8_t> found(1);
      while (true) store->Has(keys, found);
    }).detach();
    while (asking == 0 || !Sleeps(asking)) std::this_thread::yield();
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(0);
    int status = -1;
    waitpid(grandchild, &status, 0);
    _exit(status == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_P(FolderStoreTest, MakesWhatIsMissingForNobodyElse) {
  const auto store = OpenFolderStore(path_ + "/a/b", Options());
  PutAll(*store, Chain("", 1, 2));
  struct stat info;
  ASSERT_EQ(stat((path_ + "/a/b").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(stat((path_ + "/a/b/key").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);
  EXPECT_EQ(info.st_size, 32);
  for (const std::string& path : FilesOf(path_ + "/a/b")) {
    if (path.ends_with("/lock")) continue;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0400u) << path;
  }
  EXPECT_EQ(store->tier(), mapped_ ? "shared" : "disk");
}

TEST_P(FolderStoreTest, SaysWhatItCannotUse) {
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != text.npos;
  };
  WriteWhole(path_, "x");
  EXPECT_TRUE(has(Refusal(), "is a file, expected a folder")) << Refusal();
  fs::remove(path_);
  fs::create_directory(above_ / "other");
  fs::create_symlink("other", path_);
  EXPECT_TRUE(has(Refusal(), "symbolic link")) << Refusal();
  EXPECT_THROW(OpenFolderStore(path_ + "/", Options()), InvalidArgument);
  EXPECT_THROW(OpenFolderStore(path_ + "/.", Options()), InvalidArgument);
  fs::remove(path_);
  mkdir(path_.c_str(), 0700);
  chmod(path_.c_str(), 0755);
  EXPECT_TRUE(has(Refusal(), "mode 0755, expected 0700")) << Refusal();
  chmod(path_.c_str(), 0500);
  EXPECT_TRUE(has(Refusal(), "mode 0500, expected 0700")) << Refusal();
  chmod(path_.c_str(), 0700);
  WriteWhole(path_ + "/letter.txt", "private");
  EXPECT_TRUE(has(Refusal(), "holds letter.txt")) << Refusal();
  EXPECT_EQ(ReadWhole(path_ + "/letter.txt"), "private");
  fs::remove(path_ + "/letter.txt");
  if (geteuid() == 0) {
    ASSERT_EQ(chown(path_.c_str(), 12345, 12345), 0);
    EXPECT_TRUE(has(Refusal(), "belongs to user 12345")) << Refusal();
    ASSERT_EQ(chown(path_.c_str(), 0, 0), 0);
  }
  EXPECT_EQ(Refusal(), "nothing");
  EXPECT_THROW(OpenFolderStore("", Options()), InvalidArgument);
  EXPECT_THROW(OpenFolderStore("/dev/null/x", Options()), Error);
  EXPECT_THROW(Open(0), InvalidArgument);
  EXPECT_THROW(OpenFolderStore(path_, {"ram", false, kLarge}), InvalidArgument);
  EXPECT_THROW(OpenFolderStore(path_, {"disk", true, kLarge}), InvalidArgument);
  setenv("GEMMAKV_FAULT", "nonsense", 1);
  EXPECT_THROW(Open(), InvalidArgument);
}

TEST(FolderStorePlaceTest, SharedIsInMemoryAndAtMostHalfOfIt) {
  const FolderAt disk(OnDisk());
  struct stat info;
  const auto on_disk = Directory::Working().OpenDirectory(OnDisk(), true);
  if (!on_disk.GetFileSystem().is_in_memory) {
    EXPECT_THROW(OpenFolderStore(disk / "a", {"shared", true, kLarge}),
                 InvalidArgument);
    // A folder that was made for nothing is gone, one of before is not.
    EXPECT_NE(stat((disk / "a").c_str(), &info), 0);
    ASSERT_EQ(mkdir((disk / "c").c_str(), 0700), 0);
    EXPECT_THROW(OpenFolderStore(disk / "c", {"shared", true, kLarge}),
                 InvalidArgument);
    EXPECT_EQ(stat((disk / "c").c_str(), &info), 0);
  }
  const FolderAt memory(InMemory());
  const auto store = OpenFolderStore(memory / "a", {"shared", true, ~0ull});
  EXPECT_LT(store->budget_bytes(), uint64_t{1} << 50);
  EXPECT_GT(store->budget_bytes(), 0u);
  EXPECT_EQ(stat((memory / "a/key").c_str(), &info), 0);
  EXPECT_EQ(OpenFolderStore(disk / "b", {"disk", false, ~0ull})->budget_bytes(),
            ~0ull);
}

// Whatever is done to files, what is found is right or a miss, and what was put
// again is found.
TEST_P(FolderStoreTest, FilesThatWereTamperedWith) {
  const auto chain = Chain("", 1, 3);
  const auto other = Chain("", 2, 3);
  const auto cut = [](const std::string& path, off_t size) {
    chmod(path.c_str(), 0600);
    ASSERT_EQ(truncate(path.c_str(), size), 0);
    chmod(path.c_str(), 0400);
  };
  using Attack = std::function<void(const std::string&, const std::string&)>;
  const std::vector<std::pair<const char*, Attack>> attacks = {
      {"emptied", [&](auto& file, auto&) { cut(file, 0); }},
      {"cut in the head", [&](auto& file, auto&) { cut(file, 100); }},
      {"cut behind the head", [&](auto& file, auto&) { cut(file, 5000); }},
      {"one byte less",
       [&](auto& file, auto&) {
         cut(file, static_cast<off_t>(fs::file_size(file)) - 1);
       }},
      {"longer", [&](auto& file, auto&) { cut(file, 1 << 20); }},
      {"longer than memory",
       [&](auto& file, auto&) { cut(file, off_t{1} << 40); }},
      {"flipped", [](auto& file, auto&) { FlipByte(file, 9000); }},
      {"swapped",
       [](auto& file, auto& second) {
         fs::rename(file, file + "x");
         fs::rename(second, file);
         fs::rename(file + "x", second);
       }},
      {"renamed over",
       [](auto& file, auto& second) { fs::rename(second, file); }},
      {"foreign",
       [](auto& file, auto&) {
         WriteWhole(file, std::string(20'000, 'x'));
         chmod(file.c_str(), 0400);
       }},
      {"writable", [](auto& file, auto&) { chmod(file.c_str(), 0600); }},
      {"a link",
       [](auto& file, auto& second) {
         fs::remove(file);
         fs::create_symlink(second, file);
       }},
      {"a link to nothing",
       [](auto& file, auto&) {
         fs::remove(file);
         fs::create_symlink("/nowhere", file);
       }},
      {"a pipe",
       [](auto& file, auto&) {
         fs::remove(file);
         ASSERT_EQ(mkfifo(file.c_str(), 0400), 0);
       }},
      {"gone", [](auto& file, auto&) { fs::remove(file); }},
  };
  for (const bool warm : {false, true}) {
    const auto store = Open();
    for (const auto& [what, attack] : attacks) {
      SCOPED_TRACE(what);
      PutAll(*store, chain);
      PutAll(*store, other);
      if (warm) {
        ASSERT_EQ(HitsOf(*store, chain), chain.size());
      }
      const std::string file = FileOf(chain[1]);
      attack(file, FileOf(other[1]));
      const size_t hits = HitsOf(*store, chain);
      EXPECT_EQ(hits, chain.size() - 1);
      EXPECT_LE(HitsOf(*store, other), other.size());
      store->Damaged(chain[1].key);
      PutAll(*store, chain);
      EXPECT_EQ(HitsOf(*store, chain), chain.size());
      store->Clear(nullptr);
    }
    fs::remove_all(path_);
  }
}

// A file under an object's name that is a folder stays there, and is a miss.
TEST_P(FolderStoreTest, AFolderUnderAnObjectsName) {
  const auto chain = Chain("", 1, 2);
  const auto store = Open();
  const std::string file = FileOf(chain.back());
  fs::create_directories(file);
  WriteWhole(file + "/precious", "x");
  PutAll(*store, chain);
  EXPECT_EQ(HitsOf(*store, chain), chain.size() - 1);
  store->Damaged(chain.back().key);
  store->Sweep();
  store->Clear(nullptr);
  EXPECT_EQ(ReadWhole(file + "/precious"), "x");
}

// A file where a subfolder should be, or a link, keeps its objects out only.
TEST_P(FolderStoreTest, AFileInTheWayOfASubfolder) {
  const auto store = Open();
  const auto folder = [&](const ChainObject& object) {
    return fs::path(FileOf(object)).parent_path();
  };
  // Of two objects, in two of the 256 subfolders.
  auto chain = Chain("", 1, 1);
  for (uint32_t n = 2; folder(chain[0]) == folder(chain[1]); ++n) {
    chain = Chain("", n, 1);
  }
  fs::create_directory(above_ / "trap");
  const std::string way = folder(chain[1]);
  for (const bool link : {false, true}) {
    if (link) {
      fs::remove(way);
      fs::create_symlink(above_ / "trap", way);
    } else {
      WriteWhole(way, "x");
    }
    PutAll(*store, chain);
    EXPECT_EQ(HitsOf(*store, chain), 1u);
    EXPECT_FALSE(store->stats().paused);
    store->Sweep();
  }
  EXPECT_EQ(store->stats().failed_writes, 2u);
  EXPECT_TRUE(FilesOf(above_ / "trap").empty());
}

TEST_P(FolderStoreTest, NamesThatAreNone) {
  const auto store = Open();
  const auto chain = Chain("", 1, 2);
  PutAll(*store, chain);
  const std::string folder = fs::path(FileOf(chain[0])).parent_path();
  const std::string name = fs::path(FileOf(chain[0])).filename();
  std::vector<std::string> others{
      "x",
      "-",
      "----",
      std::string(255, 'a'),
      name + "0",
      name.substr(1),
      name + "-1",
      name.substr(0, name.size() - 1) + "4",
      "0" + name,
      "\xff\n",
      std::string(200, '-'),
      name.substr(0, 66) + "0256" + name.substr(69)};
  for (const std::string& other : others) {
    EXPECT_FALSE(FileName::Parse(other)) << other;
    WriteWhole(folder + "/" + other, "not ours");
  }
  EXPECT_TRUE(FileName::Parse(name));
  EXPECT_EQ(FileName::Parse(name)->Text(), name);
  // Right, and in another's folder.
  const std::string wrong = path_ + (folder.ends_with("00") ? "/01/" : "/00/");
  fs::create_directory(wrong);
  WriteWhole(wrong + name, "not ours");
  EXPECT_EQ(store->Sweep().entries, chain.size());
  store->Clear(nullptr);
  for (const std::string& other : others) {
    EXPECT_EQ(ReadWhole(folder + "/" + other), "not ours");
  }
  EXPECT_EQ(DescribeFolder(path_).groups.size(), 0u);
}

TEST_P(FolderStoreTest, SweepsToItsBudgetLeavesFirst) {
  const auto old = Chain("", 1, 6);
  const auto middle = Chain("", 2, 6);
  const auto recent = Chain("", 3, 6);
  const auto large = Open();
  for (const auto* chain : {&old, &middle, &recent}) PutAll(*large, *chain);
  // Parents older than children: their order counts all the same.
  int64_t age = -100'000;
  for (const auto* chain : {&old, &middle, &recent}) {
    for (const auto& object : *chain) SetUsed(FileOf(object), age += 100);
  }
  const uint64_t all = SizeOf(old) * 3;
  // A little less than two thirds: the oldest chain goes, and one leaf.
  const auto store = Open(SizeOf(old) * 2);
  const SweepResult result = store->Sweep();
  EXPECT_TRUE(result.swept);
  EXPECT_LE(result.bytes, SizeOf(old) * 2 * 9 / 10);
  EXPECT_GT(result.bytes + 40'000, SizeOf(old) * 2 * 9 / 10);
  EXPECT_GT(all, result.bytes);
  EXPECT_EQ(HitsOf(*large, recent), recent.size());
  EXPECT_EQ(HitsOf(*large, old), 0u);
  const size_t kept = HitsOf(*large, middle);
  EXPECT_LT(kept, middle.size());
  // What is left of it is its beginning.
  std::vector<uint8_t> found(middle.size());
  std::vector<ObjectKey> forward;
  for (const auto& object : middle) forward.push_back(object.key);
  large->Has(forward, found);
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end(), std::greater<>()));
  EXPECT_EQ(store->stats().evictions, result.removed);
}

TEST_P(FolderStoreTest, WritersKeepToTheBudget) {
  const uint64_t budget = 600'000;
  const auto store = Open(budget);
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const auto chain = Chain("", seed, 3);
    PutAll(*store, chain);
    uint64_t bytes = 0;
    for (const auto& path : FilesOf(path_)) bytes += fs::file_size(path);
    ASSERT_LE(bytes, budget);
  }
  const StoreStats stats = store->stats();
  EXPECT_GT(stats.evictions, 100u);
  EXPECT_EQ(stats.entries, DescribeFolder(path_).groups[0].entries +
                               DescribeFolder(path_).groups[1].entries);
  EXPECT_GT(HitsOf(*store, Chain("", 59, 3)), 0u);
  // Larger than all of it: not stored, nothing goes for it.
  const auto tiny = Open(10'000);
  PutAll(*tiny, Chain("new", 1, 1));
  EXPECT_EQ(tiny->stats().failed_writes, 2u);
}

TEST_P(FolderStoreTest, OrphansGoRootlessOnesStay) {
  const auto chain = Chain("", 1, 4);
  auto free = Chain("", 2, 2);
  for (auto& object : free) object.key.parent = {};
  const auto store = Open();
  PutAll(*store, chain);
  PutAll(*store, {free.back()});
  EXPECT_EQ(store->Sweep().removed, 0u);
  fs::remove(FileOf(chain[1]));
  EXPECT_EQ(store->Sweep().removed, chain.size() - 2);
  EXPECT_EQ(HitsOf(*store, chain), 1u);
  EXPECT_EQ(HitsOf(*store, {free.back()}), 1u);
  // Names that claim each other, or themselves, as parent.
  const std::string a(32, 'a'), b(32, 'b'), salt(16, '0');
  fs::create_directories(path_ + "/aa");
  fs::create_directories(path_ + "/bb");
  WriteWhole(path_ + "/aa/" + a + "-" + b + "-512-" + salt + "-1", "x");
  WriteWhole(path_ + "/bb/" + b + "-" + a + "-768-" + salt + "-1", "x");
  WriteWhole(path_ + "/aa/" + a + "-" + a + "-1024-" + salt + "-1", "x");
  EXPECT_EQ(store->Sweep().removed, 3u);
}

TEST_P(FolderStoreTest, TimesInTheFutureAreNow) {
  const auto early = Chain("", 1, 2);
  const auto late = Chain("", 2, 2);
  const auto large = Open();
  PutAll(*large, early);
  PutAll(*large, late);
  for (const auto& object : early) SetUsed(FileOf(object), 1'000'000'000);
  for (const auto& object : late) SetUsed(FileOf(object), -1'000'000'000);
  const auto store = Open(SizeOf(early) * 2 - 1);
  store->Sweep();
  EXPECT_EQ(HitsOf(*large, early), early.size());
  EXPECT_LT(HitsOf(*large, late), late.size());
  // Used, it has the time of its use; and it is not immortal.
  struct stat info;
  ASSERT_EQ(stat(FileOf(early[0]).c_str(), &info), 0);
  EXPECT_LE(info.st_atim.tv_sec, SecondsNow());
  EXPECT_EQ(Open(1)->Sweep().entries, 0u);
}

// A clock that was ahead for a while left objects that nobody uses any more the
// newest for as long: all that was used meanwhile went before them.
TEST_P(FolderStoreTest, TimesInTheFutureEndWithASweep) {
  const auto late = Chain("", 1, 2);
  const auto later = Chain("", 2, 2);
  const auto recent = Chain("", 3, 2);
  const auto large = Open();
  for (const auto* chain : {&later, &late, &recent}) PutAll(*large, *chain);
  for (const auto& object : late) SetUsed(FileOf(object), 1'000'000);
  for (const auto& object : later) SetUsed(FileOf(object), 2'000'000);
  large->Sweep();
  for (const auto* chain : {&late, &later}) {
    for (const auto& object : *chain) {
      struct stat info;
      ASSERT_EQ(stat(FileOf(object).c_str(), &info), 0);
      EXPECT_LE(info.st_atim.tv_sec, SecondsNow());
      EXPECT_LE(info.st_mtim.tv_sec, SecondsNow());
    }
  }
  // Times of files have ticks of up to 10 ms: each use is later than the last.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (const auto& object : recent) SetUsed(FileOf(object), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  // Room for two of the three, then for one.
  Open(SizeOf(late) * 5 / 2)->Sweep();
  EXPECT_LT(HitsOf(*large, late), late.size());
  EXPECT_EQ(HitsOf(*large, later), later.size());
  Open(SizeOf(late) * 3 / 2)->Sweep();
  EXPECT_LT(HitsOf(*large, later), later.size());
  EXPECT_EQ(HitsOf(*large, recent), recent.size());
}

TEST_P(FolderStoreTest, UseIsNotedOnceAMinute) {
  const auto chain = Chain("", 1, 2);
  const auto store = Open();
  PutAll(*store, chain);
  for (const auto& object : chain) SetUsed(FileOf(object), -3600);
  const auto used = [&](size_t i) {
    struct stat info;
    EXPECT_EQ(stat(FileOf(chain[i]).c_str(), &info), 0);
    return info.st_atim.tv_sec;
  };
  const time_t now = SecondsNow();
  HitsOf(*store, chain);
  for (size_t i = 0; i < chain.size(); ++i) EXPECT_GE(used(i), now - 1);
  SetUsed(FileOf(chain[0]), -30);
  HitsOf(*store, chain);
  EXPECT_LE(used(0), now - 20);
  // Asking whether it is there is no use.
  SetUsed(FileOf(chain[0]), -3600);
  std::vector<uint8_t> found(chain.size());
  store->Has(KeysOf(chain), found);
  EXPECT_LE(used(0), now - 3000);
}

TEST_P(FolderStoreTest, DeadTemporaryFilesGoLiveOnesStay) {
  const auto store = Open();
  PutAll(*store, Chain("", 1, 1));
  fs::create_directories(path_ + "/00");
  const std::string dead = path_ + "/00/.tmp-0123456789abcdef";
  const std::string top = path_ + "/.tmp-0123456789abcdef";
  const std::string live = path_ + "/00/.tmp-fedcba9876543210";
  for (const auto& path : {dead, top, live}) WriteWhole(path, "half");
  {
    const File writer = Directory::Working().OpenToWrite(live);
    ASSERT_EQ(writer.TryLock(true), LockResult::kHeld);
    EXPECT_EQ(store->Sweep().removed_temporary, 2u);
    EXPECT_EQ(FilesOf(path_, ".tmp-"), std::vector{live});
  }
  EXPECT_EQ(store->Sweep().removed_temporary, 1u);
}

// Where files without names cannot be had, or cannot get one.
TEST_P(FolderStoreTest, WithoutUnnamedFiles) {
  const auto chain = Chain("", 1, 3);
  SetFault("unnamed:errno=95");
  const auto store = Open();
  PutAll(*store, chain);
  PutAll(*store, chain);
  EXPECT_EQ(HitsOf(*store, chain), chain.size());
  EXPECT_TRUE(FilesOf(path_, ".tmp-").empty());
  store->Clear(nullptr);
  SetFault("unnamed:errno=95,written:errno=28");
  PutAll(*store, chain);
  EXPECT_TRUE(FilesOf(path_, ".tmp-").empty());
  EXPECT_EQ(HitsOf(*store, chain), 0u);
}

// What fails is not stored and not tried for a while; reading goes on.
TEST_P(FolderStoreTest, WritesThatFailAreNotTriedForAWhile) {
  for (const char* fault : {"opened:errno=28", "half-written:errno=122",
                            "written:errno=30", "half-written:errno=5"}) {
    SCOPED_TRACE(fault);
    const auto there = Chain("", 1, 2);
    const auto fresh = Chain("", 2, 2);
    bool in_time = false;  // a busy machine may take longer than the pause is
    for (int i = 0; i < 20 && !in_time; ++i) {
      const auto store = Open();
      PutAll(*store, there);
      SetFault(fault);
      // No upper bound: whether the pause was still going on.
      const auto begin = std::chrono::steady_clock::now();
      PutAll(*store, fresh);
      EXPECT_EQ(store->stats().failed_writes, fresh.size());
      const bool paused = store->stats().paused;
      EXPECT_EQ(HitsOf(*store, there), there.size());
      EXPECT_EQ(HitsOf(*store, fresh), 0u);
      SetFault(nullptr);
      PutAll(*store, fresh);
      const size_t hits = HitsOf(*store, fresh);
      in_time = std::chrono::steady_clock::now() - begin <
                std::chrono::milliseconds(250);
      if (in_time) {
        EXPECT_TRUE(paused);
        EXPECT_EQ(hits, 0u);  // still paused
      }
      EXPECT_TRUE(Eventually([&] { return !store->stats().paused; }));
      PutAll(*store, fresh);
      EXPECT_EQ(HitsOf(*store, fresh), fresh.size());
      store->Clear(nullptr);
    }
    EXPECT_TRUE(in_time);
  }
}

TEST_P(FolderStoreTest, AFileMayNotBecomeSoLarge) {
  const auto store = Open();
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 8192;  // more would be a signal that ends the process
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  PutAll(*store, Chain("", 1, 1));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(store->stats().failed_writes, 2u);
  EXPECT_EQ(HitsOf(*store, Chain("", 1, 1)), 0u);
}

TEST_P(FolderStoreTest, TheFolderVanishesAndIsMadeAgain) {
  const auto chain = Chain("", 1, 2);
  const auto store = Open();
  PutAll(*store, chain);
  const std::string key = ReadWhole(path_ + "/key");
  const auto held = store->Load(KeysOf(chain));
  fs::remove_all(path_);
  EXPECT_EQ(HitsOf(*store, chain), 0u);
  store->Sweep();
  PutAll(*store, chain);
  EXPECT_EQ(HitsOf(*store, chain), chain.size());
  EXPECT_NE(ReadWhole(path_ + "/key"), key);
  EXPECT_EQ(store->stats().failed_writes, 0u);
  EXPECT_EQ(store->stats().entries, chain.size());
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_TRUE(SameBytes(held[i].object.bytes,
                          chain[chain.size() - 1 - i].bytes.bytes));
  }
  // A subfolder alone.
  fs::remove_all(fs::path(FileOf(chain[0])).parent_path());
  PutAll(*store, chain);
  EXPECT_EQ(HitsOf(*store, chain), chain.size());
}

// Another process made it again: its key is found by who only reads.
TEST_P(FolderStoreTest, AnotherFolderInItsPlace) {
  const auto chain = Chain("", 1, 2);
  const auto store = Open();
  PutAll(*store, chain);
  fs::rename(path_, above_ / "moved");
  PutAll(*Open(), chain);
  EXPECT_TRUE(
      Eventually([&] { return HitsOf(*store, chain) == chain.size(); }));
  EXPECT_EQ(store->stats().entries, chain.size());
  // A link in its place is not followed, what was open stays so.
  fs::rename(path_, above_ / "again");
  fs::create_directory(above_ / "trap");
  fs::create_symlink("trap", path_);
  // Until it looks again, at a read: nothing tells of it.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(HitsOf(*store, chain), chain.size());
  uint32_t number = 1;
  EXPECT_TRUE(Eventually([&] {
    PutAll(*store, Chain("", ++number, 2));
    return store->stats().paused;  // for longer each time
  }));
  EXPECT_GT(store->stats().failed_writes, 0u);
  EXPECT_TRUE(FilesOf(above_ / "trap").empty());
}

TEST_P(FolderStoreTest, AKeyThatWasTornIsMadeAgain) {
  const auto chain = Chain("", 1, 2);
  PutAll(*Open(), chain);
  for (const char* content :
       {"", "short", "far too long for a key of a store"}) {
    WriteWhole(path_ + "/key", content);
    chmod((path_ + "/key").c_str(), 0400);
    EXPECT_THROW(DescribeFolder(path_), CorruptFile);
    const auto store = Open();
    EXPECT_EQ(HitsOf(*store, chain), 0u);
    PutAll(*store, chain);
    EXPECT_EQ(HitsOf(*Open(), chain), chain.size());
  }
}

TEST_P(FolderStoreTest, ReadOnly) {
  if (geteuid() != 0) GTEST_SKIP() << "mounting needs root";
  const auto chain = Chain("", 1, 2);
  PutAll(*Open(), chain);
  if (mount(path_.c_str(), path_.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    GTEST_SKIP() << "no mounts here";
  }
  ASSERT_EQ(mount(nullptr, path_.c_str(), nullptr,
                  MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr),
            0);
  {
    const auto store = Open();
    EXPECT_EQ(HitsOf(*store, chain), chain.size());
    PutAll(*store, Chain("", 2, 1));
    EXPECT_EQ(store->stats().failed_writes, 2u);
    EXPECT_TRUE(Eventually([&] {
      PutAll(*store, Chain("", 2, 1));
      return store->stats().paused;  // for longer each time
    }));
    EXPECT_EQ(store->Sweep().entries, chain.size());
    store->Damaged(chain[0].key);
    store->Remove(KeysOf(chain));
    store->Clear(nullptr);
    EXPECT_EQ(HitsOf(*store, chain), chain.size());
  }
  EXPECT_EQ(umount2(path_.c_str(), MNT_DETACH), 0);
}

// A memory file system of 300 kB, and one with no more than 24 files.
TEST(FolderStorePlaceTest, FullFileSystems) {
  if (geteuid() != 0) GTEST_SKIP() << "mounting needs root";
  for (const char* options : {"size=300k", "nr_inodes=24"}) {
    SCOPED_TRACE(options);
    const FolderAt above(OnDisk());
    const std::string place = above / "place";
    mkdir(place.c_str(), 0700);
    if (mount("tmpfs", place.c_str(), "tmpfs", 0, options) != 0) {
      GTEST_SKIP() << "no mounts here";
    }
    for (const bool mapped : {true, false}) {
      // "disk" may have more than there is.
      const FolderOptions folder{mapped ? "shared" : "disk", mapped, kLarge};
      const auto store = OpenFolderStore(place + "/cache", folder);
      if (mapped && options[0] == 's') {
        EXPECT_EQ(store->budget_bytes(), 150u << 10);
      }
      const auto chain = Chain("", 1, 40);
      PutAll(*store, chain);
      const size_t hits = HitsOf(*store, chain);
      EXPECT_GT(hits, 2u);
      EXPECT_LT(hits, chain.size());
      if (options[0] == 'n') {
        EXPECT_GT(store->stats().failed_writes, 0u);
        EXPECT_TRUE(Eventually([&] {
          PutAll(*store, chain);
          return store->stats().paused;  // for longer each time
        }));
      }
      // Others have room, however large the budget is.
      if (options[0] == 's') {
        EXPECT_GT(store->stats().evictions, 0u);
        const FileSystemRoom room =
            RoomOf(*Folder::Open(place + "/cache", false));
        EXPECT_EQ(room.reserved_bytes, (300u << 10) / 32);
        EXPECT_GE(room.free_bytes, room.reserved_bytes);
      }
      EXPECT_TRUE(FilesOf(place, ".tmp-").empty());
      // Room again: after a while it goes on.
      store->Clear(nullptr);
      const auto fresh = Chain("", 2, 2);
      EXPECT_TRUE(Eventually([&] {
        PutAll(*store, fresh);
        return HitsOf(*store, fresh) == fresh.size();
      }));
      fs::remove_all(place + "/cache");
    }
    EXPECT_EQ(umount2(place.c_str(), MNT_DETACH), 0);
  }
}

// Others fill the file system: what is stored gives way, as far as it can, and
// then nothing is stored.
TEST(FolderStorePlaceTest, OthersNeedRoom) {
  if (geteuid() != 0) GTEST_SKIP() << "mounting needs root";
  const FolderAt above(OnDisk());
  const std::string place = above / "place";
  mkdir(place.c_str(), 0700);
  if (mount("tmpfs", place.c_str(), "tmpfs", 0, "size=640k") != 0) {
    GTEST_SKIP() << "no mounts here";
  }
  {
    const auto store = OpenFolderStore(place + "/cache", {"disk", false, kLarge});
    const auto known = Chain("", 1, 12);
    PutAll(*store, known);
    ASSERT_EQ(HitsOf(*store, known), known.size());
    EXPECT_EQ(store->Sweep().removed, 0u);
    const auto folder = Folder::Open(place + "/cache", false);
    const auto leave = [&](uint64_t bytes) {
      const FileSystemRoom room = RoomOf(*folder);
      ASSERT_GT(room.free_bytes, bytes);
      WriteWhole(place + "/others" + std::to_string(bytes),
                 std::string(room.free_bytes - bytes, 'x'));
    };
    leave(12u << 10);  // of 20 that are reserved
    const auto fresh = Chain("", 2, 1);
    PutAll(*store, fresh);
    EXPECT_GT(store->stats().evictions, 0u);
    EXPECT_EQ(store->stats().failed_writes, 0u);
    const FileSystemRoom room = RoomOf(*folder);
    EXPECT_GE(room.free_bytes, room.reserved_bytes);
    EXPECT_LT(HitsOf(*store, known), known.size());
    EXPECT_GT(HitsOf(*store, known), 0u);
    // Nothing of its own is left to give.
    store->Clear(nullptr);
    leave(16u << 10);
    PutAll(*store, fresh);
    EXPECT_EQ(HitsOf(*store, fresh), 0u);
    EXPECT_GT(store->stats().failed_writes, 0u);
    EXPECT_TRUE(Eventually([&] {
      PutAll(*store, fresh);
      return store->stats().paused;  // for longer each time
    }));
  }
  EXPECT_EQ(umount2(place.c_str(), MNT_DETACH), 0);
}

TEST_P(FolderStoreTest, OneSweepsAtATime) {
  const auto store = Open();
  PutAll(*store, Chain("", 1, 2));
  const auto folder = Folder::Open(path_, false);
  {
    const File lock = folder->OpenLock();
    ASSERT_EQ(lock.TryLock(true), LockResult::kHeld);
    EXPECT_FALSE(store->Sweep().swept);
    EXPECT_EQ(store->stats().entries, 3u);
  }
  EXPECT_TRUE(store->Sweep().swept);
  // Two stores, their sweepers and writers beside each other.
  const auto other = Open(200'000);
  std::thread sweeper([&] {
    for (int i = 0; i < 200; ++i) other->Sweep();
  });
  const auto chain = Chain("", 7, 6);
  for (int i = 0; i < 50; ++i) {
    PutAll(*store, chain);
    HitsOf(*store, chain);
    store->Sweep();
  }
  sweeper.join();
  EXPECT_EQ(store->stats().damaged, 0u);
  EXPECT_EQ(other->stats().damaged, 0u);
}

TEST(FolderStorePlaceTest, OneMappingForAll) {
  const FolderAt above(InMemory());
  const std::string path = above / "cache";
  const auto store = OpenFolderStore(path, {"shared", true, kLarge});
  const auto chain = Chain("", 1, 1);
  PutAll(*store, chain);
  const auto first = store->Load(KeysOf(chain));
  const auto second = store->Load(KeysOf(chain));
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].object.bytes.data(), second[i].object.bytes.data());
    EXPECT_TRUE(first[i].object.mapped);
    EXPECT_TRUE(first[i].object.checked);
  }
}

// Files that are unlinked and mapped take memory still: they count.
TEST(FolderStorePlaceTest, WhatIsMappedCountsUntilItIsLetGo) {
  const FolderAt above(InMemory());
  const std::string path = above / "cache";
  const auto large = OpenFolderStore(path, {"shared", true, kLarge});
  const auto first = Chain("", 1, 5);
  const auto second = Chain("", 2, 5);
  PutAll(*large, first);
  uint64_t size = 0;
  for (const auto& object : first) {
    size += CountedBytes(object.bytes.bytes.size());
  }
  const auto store = OpenFolderStore(path, {"shared", true, size * 3 / 2});
  auto held = store->Load(KeysOf(first));
  large->Clear(nullptr);
  PutAll(*large, second);
  const SweepResult tight = store->Sweep();
  EXPECT_GT(tight.removed, 0u);
  EXPECT_LE(tight.bytes, size * 3 / 2 * 9 / 10 - size);
  held.clear();
  PutAll(*large, second);
  EXPECT_EQ(store->Sweep().removed, 0u);
}

TEST(FolderStorePlaceTest, ThousandsOfMappingsNotMore) {
  const FolderAt above(InMemory());
  const std::string path = above / "cache";
  const auto store = OpenFolderStore(path, {"shared", true, uint64_t{1} << 30});
  std::vector<Loaded> held;
  const auto chain = Chain("", 1, 4200);
  PutAll(*store, chain);
  for (const ObjectKey& key : KeysOf(chain)) {
    Loaded one = store->Load(std::span(&key, 1))[0];
    if (one.state == LoadState::kHit) held.push_back(std::move(one));
  }
  EXPECT_EQ(held.size(), 4096u);
  const ObjectKey key = chain[0].key;
  EXPECT_EQ(store->Load(std::span(&key, 1))[0].state, LoadState::kMiss);
  held.clear();
  EXPECT_EQ(store->Load(std::span(&key, 1))[0].state, LoadState::kHit);
}

TEST_P(FolderStoreTest, Describes) {
  EXPECT_THROW(DescribeFolder(path_), IoError);
  EXPECT_FALSE(fs::exists(path_));
  fs::create_directory(path_);
  chmod(path_.c_str(), 0700);
  EXPECT_THROW(DescribeFolder(path_), InvalidArgument);
  const auto store = Open();
  EXPECT_EQ(DescribeFolder(path_).oldest_ns, 0);
  PutAll(*store, Chain("", 1, 3));
  PutAll(*store, Chain("tenant", 1, 2));
  SetUsed(FileOf(Chain("", 1, 3)[0]), -500);
  const FolderReport report = DescribeFolder(path_);
  ASSERT_EQ(report.groups.size(), 4u);
  EXPECT_EQ(report.groups[0].entries, 3u);  // no salt: zeros are first
  EXPECT_EQ(report.groups[1].kind, ObjectKind::kResume);
  EXPECT_EQ(report.groups[2].entries, 2u);
  EXPECT_NE(report.groups[2].salt, report.groups[0].salt);
  EXPECT_GT(report.newest_ns - report.oldest_ns, 499'000'000'000);
  if (mapped_) {
    EXPECT_EQ(report.file_system, "tmpfs");
  }
}

}  // namespace
}  // namespace gkv
