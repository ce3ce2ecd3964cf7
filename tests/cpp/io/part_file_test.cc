#include "io/part_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "io/temp_folder.h"

namespace gkv {
namespace {

using std::chrono::milliseconds;

std::span<const uint8_t> BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

PartFile Create(const std::string& path) {
  std::optional<PartFile> part = PartFile::Create(path, milliseconds(0));
  if (!part) throw std::runtime_error("held by another");
  return std::move(*part);
}

int ErrorOf(const std::string& path) {
  try {
    PartFile::Create(path, milliseconds(0));
  } catch (const IoError& error) {
    return error.error_number();
  }
  return 0;
}

TEST(PartFileTest, AppearsWholeAndReadOnly) {
  TempFolder folder;
  const std::string path = folder / "a/b/file";
  {
    PartFile part = Create(path);
    part.Reserve(10);
    EXPECT_EQ(part.WriteAt(5, BytesOf("67890")), 0);
    EXPECT_EQ(part.WriteAt(0, BytesOf("12345")), 0);
    EXPECT_FALSE(std::filesystem::exists(path));
    part.Publish();
  }
  EXPECT_EQ(ReadWhole(path), "1234567890");
  EXPECT_FALSE(std::filesystem::exists(path + ".part"));
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0400u);
}

TEST(PartFileTest, VanishesUnlessPublished) {
  TempFolder folder;
  {
    PartFile part = Create(folder / "file");
    part.Reserve(3);
    EXPECT_EQ(folder.Names(), std::vector<std::string>{"file.part"});
    const PartFile moved = std::move(part);
  }
  EXPECT_TRUE(folder.Names().empty());
}

TEST(PartFileTest, ReplacesWhatWasThereInOneStep) {
  TempFolder folder;
  WriteWhole(folder / "file", "old");
  PartFile part = Create(folder / "file");
  part.Reserve(3);
  ASSERT_EQ(part.WriteAt(0, BytesOf("new")), 0);
  EXPECT_EQ(ReadWhole(folder / "file"), "old");
  part.Publish();
  EXPECT_EQ(ReadWhole(folder / "file"), "new");
}

TEST(PartFileTest, NothingOfAKilledWriterIsLeft) {
  TempFolder folder;
  WriteWhole(folder / "file.part", "longer than what comes");
  PartFile part = Create(folder / "file");
  part.Reserve(4);
  ASSERT_EQ(part.WriteAt(0, BytesOf("ab")), 0);
  part.Publish();
  EXPECT_EQ(ReadWhole(folder / "file"), std::string("ab\0\0", 4));
}

TEST(PartFileTest, OneWriterAtATime) {
  TempFolder folder;
  std::optional<PartFile> first = Create(folder / "file");
  EXPECT_EQ(PartFile::Create(folder / "file", milliseconds(0)), std::nullopt);
  EXPECT_EQ(PartFile::Create(folder / "file", milliseconds(25)), std::nullopt);
  EXPECT_NE(PartFile::Create(folder / "other", milliseconds(0)), std::nullopt);
  int polls = 0;
  const auto give_up = [&] {
    if (++polls == 3) throw std::runtime_error("enough");
  };
  EXPECT_THROW(PartFile::Create(folder / "file", milliseconds(60000), give_up),
               std::runtime_error);
  // One that waits gets in as soon as the first is through.
  std::thread waiting([&] {
    PartFile second = *PartFile::Create(folder / "file", milliseconds(60000));
    second.Reserve(1);
    EXPECT_EQ(ReadWhole(folder / "file"), "first");
    EXPECT_EQ(second.WriteAt(0, BytesOf("2")), 0);
    second.Publish();
  });
  first->Reserve(5);
  ASSERT_EQ(first->WriteAt(0, BytesOf("first")), 0);
  first->Publish();
  first.reset();
  waiting.join();
  EXPECT_EQ(ReadWhole(folder / "file"), "2");
}

TEST(PartFileTest, TheDeathOfAHolderFreesTheFile) {
  TempFolder folder;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const PartFile part = Create(folder / "file");
    (void)!write(ready[1], "x", 1);
    while (true) pause();
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(PartFile::Create(folder / "file", milliseconds(0)), std::nullopt);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_NE(PartFile::Create(folder / "file", milliseconds(0)), std::nullopt);
  close(ready[0]);
  close(ready[1]);
}

TEST(PartFileTest, TooLargeIsAnErrorAndNoSignal) {
  TempFolder folder;
  struct rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const struct rlimit small = {4096, old_limit.rlim_max};
  PartFile part = Create(folder / "file");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  part.Reserve(4096);
  try {
    part.Reserve(4097);
    ADD_FAILURE() << "reserved beyond the limit";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), EFBIG);
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  // More than any disk has.
  EXPECT_THROW(part.Reserve(uint64_t{1} << 62), IoError);
}

TEST(PartFileTest, FoldersAndFilesInTheWay) {
  TempFolder folder;
  WriteWhole(folder / "plain", "");
  EXPECT_NE(ErrorOf(folder / "plain/file"), 0);
  // A link could lead to a file of value.
  WriteWhole(folder / "value", "keep");
  std::filesystem::create_symlink(folder / "value", folder / "link.part");
  EXPECT_EQ(ErrorOf(folder / "link"), ELOOP);
  EXPECT_EQ(ReadWhole(folder / "value"), "keep");
  ASSERT_EQ(mkfifo((folder / "pipe.part").c_str(), 0600), 0);
  EXPECT_EQ(ErrorOf(folder / "pipe"), EINVAL);
  std::filesystem::create_directory(folder / "dir.part");
  EXPECT_EQ(ErrorOf(folder / "dir"), EISDIR);
  // The final name is a folder: nothing is replaced, nothing left behind.
  std::filesystem::create_directory(folder / "taken");
  {
    PartFile part = Create(folder / "taken");
    EXPECT_THROW(part.Publish(), IoError);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "taken.part"));
}

// Of many small files: with a name and without one.
class SmallPartFileTest : public testing::TestWithParam<bool> {
 protected:
  PartFile Create(const std::string& name) const {
    return PartFile::CreateIn(directory_, name, ".tmp-", GetParam());
  }

  const TempFolder folder_;
  const Directory directory_ =
      Directory::Working().OpenDirectory(folder_.path());
};
INSTANTIATE_TEST_SUITE_P(Names, SmallPartFileTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& named) {
                           return named.param ? "Named" : "Unnamed";
                         });

TEST_P(SmallPartFileTest, AppearsWholeReadOnlyAndOnce) {
  {
    PartFile first = Create("file"), second = Create("file");
    if (GetParam()) {
      EXPECT_TRUE(first.is_named());
      const auto names = folder_.Names();
      ASSERT_EQ(names.size(), 2u);
      EXPECT_TRUE(names[0].starts_with(".tmp-"));
      // Whoever finds it knows that its writer lives.
      EXPECT_EQ(directory_.OpenToRead(names[0]).TryLock(false),
                LockResult::kTaken);
    }
    EXPECT_EQ(first.WriteAt(0, BytesOf("first")), 0);
    EXPECT_EQ(second.WriteAt(0, BytesOf("second")), 0);
    EXPECT_FALSE(directory_.InfoOf("file"));
    first.Publish();
    try {
      second.Publish(false);
      ADD_FAILURE() << "two files of a name";
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), EEXIST);
    }
  }
  EXPECT_EQ(folder_.Names(), std::vector<std::string>{"file"});
  EXPECT_EQ(ReadWhole(folder_ / "file"), "first");
  EXPECT_EQ(directory_.InfoOf("file")->mode, 0400u);
}

TEST_P(SmallPartFileTest, VanishesUnlessPublished) {
  {
    const PartFile part = Create("file");
    EXPECT_EQ(part.WriteAt(0, BytesOf("x")), 0);
  }
  EXPECT_TRUE(folder_.Names().empty());
}

TEST_P(SmallPartFileTest, AFolderThatIsGone) {
  PartFile part = Create("file");
  std::filesystem::remove_all(folder_.path());
  try {
    part.Publish(false);
    ADD_FAILURE() << "published nowhere";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOENT);
  }
  EXPECT_THROW(Create("file"), IoError);
}

}  // namespace
}  // namespace gkv
