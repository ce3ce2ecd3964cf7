#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "io/temp_file.h"

namespace gkv {
namespace {

// The error number with which `path` cannot be opened, or 0.
int ErrorOf(const std::string& path) {
  try {
    MappedFile file(path);
  } catch (const IoError& error) {
    EXPECT_EQ(error.path(), path);
    EXPECT_TRUE(std::string(error.what()).starts_with(path + ": "))
        << error.what();
    return error.error_number();
  }
  return 0;
}

std::vector<uint8_t> Pattern(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 7 + 1);
  return bytes;
}

std::vector<uint8_t> Content(const MappedFile& file) {
  return {file.bytes().begin(), file.bytes().end()};
}

TEST(MappedFileTest, BytesAreThoseOfTheFile) {
  for (const size_t size : {1, 4095, 4096, 4097, 100000}) {
    const std::vector<uint8_t> bytes = Pattern(size);
    const TempFile on_disk(bytes);
    const MappedFile file(on_disk.path());
    EXPECT_EQ(file.path(), on_disk.path());
    EXPECT_EQ(Content(file), bytes) << size;
  }
}

TEST(MappedFileTest, OutlivesTheDirectoryEntry) {
  const std::vector<uint8_t> bytes = Pattern(5000);
  auto on_disk = std::make_unique<TempFile>(bytes);
  const MappedFile file(on_disk->path());
  on_disk.reset();
  EXPECT_EQ(Content(file), bytes);
}

TEST(MappedFileTest, WhatCannotBeOpened) {
  const std::string folder = ::testing::TempDir();
  EXPECT_EQ(ErrorOf(folder + "no_such_file"), ENOENT);
  EXPECT_EQ(ErrorOf(folder), EISDIR);
  EXPECT_EQ(ErrorOf(""), ENOENT);
  EXPECT_EQ(ErrorOf("/dev/null"), EINVAL);
  const TempFile file(Pattern(10));
  EXPECT_EQ(ErrorOf(file.path() + "/x"), ENOTDIR);
}

TEST(MappedFileTest, WithoutPermission) {
  if (geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const TempFile file(Pattern(10));
  ASSERT_EQ(chmod(file.path().c_str(), 0), 0);
  EXPECT_EQ(ErrorOf(file.path()), EACCES);
}

// Opening a pipe must not wait for someone to write to it.
TEST(MappedFileTest, NamedPipesAreRefusedAtOnce) {
  const std::string path =
      StrCat(::testing::TempDir(), "gemmakv_pipe_", getpid());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(ErrorOf(path), EINVAL);
  unlink(path.c_str());
}

TEST(MappedFileTest, AnEmptyFileIsCorrupt) {
  const TempFile on_disk({});
  try {
    MappedFile file(on_disk.path());
    FAIL();
  } catch (const CorruptFile& error) {
    EXPECT_EQ(error.what(), on_disk.path() +
                                ": offset 0: found an empty file, expected "
                                "content");
  }
}

TEST(MappedFileTest, MovesKeepTheMapping) {
  const std::vector<uint8_t> a = Pattern(100);
  const std::vector<uint8_t> b(200, 9);
  const TempFile on_disk_a(a);
  const TempFile on_disk_b(b);
  MappedFile first(on_disk_a.path());
  const uint8_t* data = first.bytes().data();
  MappedFile second(std::move(first));
  EXPECT_EQ(second.bytes().data(), data);
  MappedFile third(on_disk_b.path());
  third = std::move(second);
  EXPECT_EQ(third.bytes().data(), data);
  EXPECT_EQ(Content(third), a);
  EXPECT_EQ(third.path(), on_disk_a.path());
}

size_t ResidentPages(const MappedFile& file) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const uint8_t* data = file.bytes().data();
  // Which pages this process has mapped, not which the system caches.
  const int fd = open("/proc/self/pagemap", O_RDONLY);
  std::vector<uint64_t> entries((file.bytes().size() + page - 1) / page);
  const auto offset = static_cast<off_t>(reinterpret_cast<uintptr_t>(data) /
                                         page * sizeof(uint64_t));
  const ssize_t got =
      pread(fd, entries.data(), entries.size() * sizeof(uint64_t), offset);
  close(fd);
  EXPECT_EQ(got, static_cast<ssize_t>(entries.size() * sizeof(uint64_t)));
  size_t resident = 0;
  for (const uint64_t entry : entries) resident += entry >> 63;
  return resident;
}

TEST(MappedFileTest, DropsWholePagesInsideTheRangeOnly) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const std::vector<uint8_t> bytes = Pattern(64 * page);
  const TempFile on_disk(bytes);
  const MappedFile file(on_disk.path());
  ASSERT_EQ(Content(file), bytes);  // touches all
  ASSERT_EQ(ResidentPages(file), 64u);
  file.DropPages(1, page);  // no whole page inside
  EXPECT_EQ(ResidentPages(file), 64u);
  file.DropPages(page - 1, 2 * page + 2);  // two whole pages
  EXPECT_EQ(ResidentPages(file), 62u);
  file.DropPages(16 * page, 16 * page);
  EXPECT_EQ(ResidentPages(file), 46u);
  EXPECT_EQ(Content(file), bytes);  // and they come back
  EXPECT_EQ(ResidentPages(file), 64u);
}

TEST(MappedFileTest, DroppingOutsideTheFileIsHarmless) {
  constexpr size_t kMax = std::numeric_limits<size_t>::max();
  const std::vector<uint8_t> bytes = Pattern(50000);
  const TempFile on_disk(bytes);
  const MappedFile file(on_disk.path());
  file.DropPages(0, 0);
  file.DropPages(0, kMax);
  file.DropPages(4096, kMax);
  file.DropPages(kMax, kMax);
  file.DropPages(kMax - 4095, 4096);
  file.DropPages(60000, 10);
  EXPECT_EQ(Content(file), bytes);
}

// Waits until a write to the file has another time than its last one.
void AwaitTick(const std::string& path) {
  const auto time = [](const struct timespec& t) {
    return std::pair(t.tv_sec, t.tv_nsec);
  };
  struct stat info;
  struct timespec now;
  do {
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    // The clock that the system takes files' times from.
    ASSERT_EQ(clock_gettime(CLOCK_REALTIME_COARSE, &now), 0);
  } while (time(now) <= std::max(time(info.st_mtim), time(info.st_ctim)));
}

TEST(MappedFileTest, AnotherContentIsAnotherIdentity) {
  const TempFile on_disk(Pattern(5000));
  const MappedFile file(on_disk.path());
  EXPECT_EQ(MappedFile(on_disk.path()).identity(), file.identity());
  EXPECT_TRUE(file.IsInPlace());
  EXPECT_NE(MappedFile(TempFile(Pattern(5000)).path()).identity(),
            file.identity());
  AwaitTick(on_disk.path());
  // The same bytes, and the time put back.
  struct stat before;
  ASSERT_EQ(stat(on_disk.path().c_str(), &before), 0);
  const int fd = open(on_disk.path().c_str(), O_WRONLY);
  ASSERT_EQ(pwrite(fd, "x", 1, 100), 1);
  const struct timespec times[2] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(futimens(fd, times), 0);
  close(fd);
  EXPECT_NE(MappedFile(on_disk.path()).identity(), file.identity());
  EXPECT_TRUE(file.IsInPlace());
  EXPECT_FALSE(file.Settle());
  // Another file takes its path.
  const TempFile other(Pattern(5000));
  ASSERT_EQ(rename(other.path().c_str(), on_disk.path().c_str()), 0);
  EXPECT_FALSE(file.IsInPlace());
}

TEST(MappedFileTest, SettlesWhenItsTimesAreOld) {
  const TempFile on_disk(Pattern(5000));
  const MappedFile file(on_disk.path());
  constexpr std::chrono::seconds kLater{3};
  bool in_time = false;  // a busy machine may be slower than a tick
  for (int i = 0; i < 20 && !in_time; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const TempFile fresh(Pattern(100));
    const bool settles = MappedFile(fresh.path()).Settle();
    in_time = std::chrono::steady_clock::now() - begin < kLater / 3;
    if (in_time) {
      EXPECT_FALSE(settles) << "another write may have the same time";
    }
  }
  EXPECT_TRUE(in_time);
  struct statfs info;
  ASSERT_EQ(statfs(on_disk.path().c_str(), &info), 0);
  constexpr int64_t kExt = 0xEF53, kTmpfs = 0x01021994, kNfs = 0x6969;
  if (info.f_type == kExt) {
    EXPECT_TRUE(file.Settle(kLater));
    AwaitTick(on_disk.path());
    // A page that was mapped and written to is no longer written to unseen.
    const int fd = open(on_disk.path().c_str(), O_RDWR);
    void* const data = mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, fd, 0);
    ASSERT_NE(data, MAP_FAILED);
    std::memset(data, 1, 1);
    EXPECT_FALSE(file.Settle(kLater));
    EXPECT_NE(MappedFile(on_disk.path()).identity(), file.identity());
    const MappedFile later(on_disk.path());
    EXPECT_TRUE(later.Settle(kLater));
    AwaitTick(on_disk.path());
    std::memset(data, 2, 1);
    EXPECT_NE(MappedFile(on_disk.path()).identity(), later.identity());
    munmap(data, 4096);
    close(fd);
  }
  if (info.f_type == kTmpfs || info.f_type == kNfs) {
    EXPECT_FALSE(file.Settle(kLater));
  }
  const std::filesystem::path memory = "/dev/shm";
  if (!std::filesystem::is_directory(memory)) return;
  const std::string path = memory / ("gemmakv." + std::to_string(getpid()));
  std::ofstream(path) << "x";
  const MappedFile on_tmpfs(path);
  EXPECT_FALSE(on_tmpfs.Settle(kLater)) << "writes through mappings leave no trace";
  std::filesystem::remove(path);
}

TEST(MappedFileTest, PopulateTellsWhatCannotBeRead) {
  const TempFile on_disk(Pattern(20000));
  const MappedFile file(on_disk.path());
  EXPECT_TRUE(file.Populate(0, 20000));
  EXPECT_TRUE(file.Populate(4095, 2));
  EXPECT_TRUE(file.Populate(19999, 1));
  std::filesystem::resize_file(on_disk.path(), 5000);
  EXPECT_TRUE(file.Populate(0, 5000));
  EXPECT_FALSE(file.Populate(0, 20000));
  EXPECT_FALSE(file.Populate(9000, 1));
}

}  // namespace
}  // namespace gkv
