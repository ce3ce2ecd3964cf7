#include "io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"
#include "io/temp_folder.h"

namespace gkv {
namespace {

namespace fs = std::filesystem;
using Kind = FileInfo::Kind;

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

Directory Open(const TempFolder& folder) {
  return Directory::Working().OpenDirectory(folder.path());
}

TEST(FileTest, ClosesWhatItHoldsOnce) {
  int fd = -1;
  {
    File first(open("/dev/null", O_RDONLY | O_CLOEXEC));
    fd = first.get();
    ASSERT_TRUE(first.is_open());
    ASSERT_TRUE(IsOpen(fd));
    {
      const File second(std::move(first));
      EXPECT_FALSE(first.is_open());
      EXPECT_EQ(second.get(), fd);
      EXPECT_TRUE(IsOpen(fd));
    }
    EXPECT_FALSE(IsOpen(fd));
    // The number may be another file's by now: the empty one leaves it alone.
    fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  }
  EXPECT_TRUE(IsOpen(fd));
  close(fd);
}

TEST(FileTest, NoneIsNotOpen) {
  const File none = Directory::Working().OpenToRead("/nowhere/at/all");
  EXPECT_EQ(errno, ENOENT);
  EXPECT_FALSE(none.is_open());
  EXPECT_FALSE(none.Info());
  EXPECT_TRUE(none.Map(1).bytes().empty());
  EXPECT_EQ(none.TryLock(true), LockResult::kImpossible);
  EXPECT_EQ(none.TryFlock(), LockResult::kImpossible);
}

TEST(FileTest, WhatIsWrittenIsRead) {
  const TempFolder folder;
  const File file = Open(folder).OpenToWrite("a");
  std::vector<uint8_t> bytes(100'000);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  EXPECT_EQ(file.WriteAt(7, bytes), 0);
  std::vector<uint8_t> read(bytes.size());
  EXPECT_EQ(file.ReadAt(7, read), 0);
  EXPECT_EQ(read, bytes);
  EXPECT_EQ(file.ReadAt(8, read), EIO);
  const Mapping mapping = file.Map(bytes.size() + 7);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(),
                         mapping.bytes().subspan(7).begin()));
  EXPECT_EQ(file.Reserve(10), 0);
  EXPECT_EQ(file.Sync(), 0);
  EXPECT_EQ(ReadWhole(folder / "a"), std::string(10, '\0'));
}

TEST(FileTest, SaysWhatFails) {
  const File full(open("/dev/full", O_RDWR | O_CLOEXEC));
  std::array<uint8_t, 4> bytes{};
  EXPECT_EQ(full.WriteAt(0, bytes), ENOSPC);
  EXPECT_EQ(File(-1).WriteAt(0, bytes), EBADF);
  EXPECT_EQ(File(-1).ReadAt(0, bytes), EBADF);
  const TempFolder folder;
  const Directory directory = Open(folder);
  EXPECT_EQ(directory.Remove("a"), ENOENT);
  EXPECT_EQ(directory.Rename("a", "b", true), ENOENT);
  EXPECT_EQ(directory.SetTimes("a", 0), ENOENT);
  EXPECT_EQ(directory.MakeDirectory("a"), 0);
  EXPECT_EQ(directory.MakeDirectory("a"), EEXIST);
  EXPECT_NE(directory.Remove("a"), 0);
  EXPECT_FALSE(MayChangeFolder(folder / "b"));
  EXPECT_TRUE(MayChangeFolder(folder.path()));
}

TEST(FileTest, SaysWhatAFileIs) {
  const TempFolder folder;
  WriteWhole(folder / "plain", "12345");
  chmod((folder / "plain").c_str(), 0640);
  fs::create_hard_link(folder / "plain", folder / "second");
  fs::create_symlink("plain", folder / "link");
  fs::create_directory(folder / "folder");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  const Directory directory = Open(folder);
  const auto plain = directory.InfoOf("plain");
  ASSERT_TRUE(plain);
  EXPECT_EQ(plain->kind, Kind::kRegular);
  EXPECT_EQ(plain->mode, 0640u);
  EXPECT_EQ(plain->owner, geteuid());
  EXPECT_EQ(plain->links, 2u);
  EXPECT_EQ(plain->size, 5u);
  EXPECT_LE(plain->written_ns, plain->changed_ns);
  EXPECT_TRUE(plain->IsSameFile(*directory.InfoOf("second")));
  EXPECT_TRUE(plain->IsSameFile(*directory.OpenToRead("second").Info()));
  EXPECT_FALSE(plain->IsSameFile(*directory.InfoOf("pipe")));
  EXPECT_EQ(directory.InfoOf("link")->kind, Kind::kLink);
  EXPECT_TRUE(plain->IsSameFile(*directory.InfoOf("link", true)));
  EXPECT_EQ(directory.InfoOf("folder")->kind, Kind::kFolder);
  EXPECT_EQ(directory.InfoOf("pipe")->kind, Kind::kOther);
  EXPECT_FALSE(directory.InfoOf("none"));
  std::vector<std::string> names;
  directory.VisitFiles([&](std::string_view name, const FileInfo& info) {
    EXPECT_TRUE(info.IsSameFile(*plain));
    names.emplace_back(name);
  });
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"plain", "second"}));
}

TEST(FileTest, TimesCanBeSet) {
  const TempFolder folder;
  WriteWhole(folder / "a", "x");
  const Directory directory = Open(folder);
  constexpr int64_t kThen = 1'600'000'000 * kSecondNs + 123'000'000;
  EXPECT_EQ(directory.SetTimes("a", kThen), 0);
  EXPECT_EQ(directory.InfoOf("a")->used_ns, kThen);
  EXPECT_EQ(directory.InfoOf("a")->written_ns, kThen);
  const File file = directory.OpenUnnoticed("a");
  const FileInfo before = *file.Info();
  EXPECT_EQ(file.SetUsed(kThen + kSecondNs), 0);
  EXPECT_TRUE(file.Info()->HasSameContent(before));
  EXPECT_EQ(file.Info()->used_ns, kThen + kSecondNs);
  EXPECT_EQ(file.Info()->written_ns, kThen);
  std::array<uint8_t, 1> bytes{};
  EXPECT_EQ(file.ReadAt(0, bytes), 0);
  EXPECT_EQ(file.Info()->used_ns, kThen + kSecondNs);
  EXPECT_EQ(directory.SetTimes("a", kThen + kSecondNs), 0);
  EXPECT_FALSE(file.Info()->HasSameContent(before));
  EXPECT_EQ(file.MakeReadOnly(), 0);
  EXPECT_EQ(file.Info()->mode, 0400u);
}

TEST(FileTest, FollowsNoLinksAndWaitsForNoPipe) {
  const TempFolder folder;
  WriteWhole(folder / "value", "keep");
  fs::create_symlink("value", folder / "link");
  fs::create_directory(folder / "real");
  fs::create_directory_symlink("real", folder / "other");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  const Directory directory = Open(folder);
  EXPECT_FALSE(directory.OpenToRead("link").is_open());
  EXPECT_EQ(errno, ELOOP);
  EXPECT_FALSE(directory.OpenUnnoticed("link").is_open());
  EXPECT_FALSE(directory.OpenToWrite("link").is_open());
  EXPECT_FALSE(directory.MakeNamed("link").is_open());
  EXPECT_FALSE(directory.OpenDirectory("other").is_open());
  EXPECT_TRUE(directory.OpenToRead("link", true).is_open());
  EXPECT_TRUE(directory.OpenDirectory("other", true).is_open());
  EXPECT_TRUE(directory.OpenToRead("pipe").is_open());
  EXPECT_FALSE(directory.OpenDirectory("value").is_open());
  EXPECT_EQ(directory.Remove("link"), 0);
  EXPECT_EQ(ReadWhole(folder / "value"), "keep");
}

// Names are those of the folder that was opened, not of its path.
TEST(FileTest, AFolderKeepsItsNames) {
  const TempFolder above;
  fs::create_directory(above / "a");
  const Directory directory =
      Directory::Working().OpenDirectory(above / "a");
  fs::rename(above / "a", above / "b");
  fs::create_directory(above / "a");
  EXPECT_TRUE(directory.OpenToWrite("file").is_open());
  EXPECT_TRUE(fs::exists(above / "b/file"));
  EXPECT_FALSE(fs::exists(above / "a/file"));
}

TEST(FileTest, NamesAreGivenOnce) {
  const TempFolder folder;
  const Directory directory = Open(folder);
  WriteWhole(folder / "taken", "keep");
  const File named = directory.MakeNamed("part");
  ASSERT_TRUE(named.is_open());
  EXPECT_FALSE(directory.MakeNamed("part").is_open());
  EXPECT_EQ(directory.Rename("part", "taken", false), EEXIST);
  EXPECT_EQ(directory.Rename("part", "free", false), 0);
  EXPECT_EQ(directory.Rename("free", "moved", true), 0);
  EXPECT_EQ(ReadWhole(folder / "taken"), "keep");
  EXPECT_EQ(directory.Rename("moved", "taken", true), 0);
  EXPECT_EQ(ReadWhole(folder / "taken"), "");
  const File unnamed = directory.MakeUnnamed();
  if (!unnamed.is_open()) GTEST_SKIP() << "no files without names here";
  EXPECT_EQ(folder.Names(), std::vector<std::string>{"taken"});
  EXPECT_EQ(directory.Link(unnamed, "taken"), EEXIST);
  EXPECT_EQ(directory.Link(unnamed, "new"), 0);
  EXPECT_TRUE(unnamed.Info()->IsSameFile(*directory.InfoOf("new")));
}

TEST(FileTest, LocksAreOfTheOpenFile) {
  const TempFolder folder;
  const Directory directory = Open(folder);
  const File second = directory.OpenToWrite("a");
  {
    const File first = directory.OpenToWrite("a");
    EXPECT_EQ(first.TryLock(true), LockResult::kHeld);
    EXPECT_EQ(second.TryLock(true), LockResult::kTaken);
    EXPECT_EQ(second.TryLock(false), LockResult::kTaken);
    EXPECT_EQ(first.TryLock(false), LockResult::kHeld);
    EXPECT_EQ(second.TryLock(false), LockResult::kHeld);
    EXPECT_EQ(first.TryFlock(), LockResult::kHeld);
    EXPECT_EQ(second.TryFlock(), LockResult::kTaken);
  }
  EXPECT_EQ(second.TryLock(true), LockResult::kHeld);
  EXPECT_EQ(second.TryFlock(), LockResult::kHeld);
}

TEST(FileTest, FileSystems) {
  const FileSystem processes =
      Directory::Working().OpenDirectory("/proc").GetFileSystem();
  EXPECT_EQ(processes.name, "0x9fa0");
  EXPECT_EQ(processes.bytes, 0u);
  const TempFolder folder;
  const FileSystem here = Open(folder).GetFileSystem();
  EXPECT_GT(here.bytes, 0u);
  EXPECT_LE(here.free_bytes, here.bytes);
  EXPECT_FALSE(here.is_in_memory && here.notes_every_write);
  const Directory memory = Directory::Working().OpenDirectory("/dev/shm");
  if (memory.is_open() && memory.GetFileSystem().name == "tmpfs") {
    EXPECT_TRUE(memory.GetFileSystem().is_in_memory);
    EXPECT_FALSE(memory.GetFileSystem().notes_every_write);
  }
}

TEST(FileTest, KnowsThisProcesssLimit) {
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_TRUE(MayBeWritten(1000));
  EXPECT_FALSE(MayBeWritten(1001));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(FileTest, CallsAgainAfterASignal) {
  int calls = 0;
  const int result = Uninterrupted([&] {
    errno = EINTR;
    return ++calls < 3 ? -1 : 5;
  });
  EXPECT_EQ(result, 5);
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace gkv
