#include "io/file_access.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <numeric>
#include <vector>

#include "io/descriptor.h"
#include "io/temp_folder.h"

namespace gkv {
namespace {

TEST(FileAccessTest, WhatIsWrittenIsRead) {
  const TempFolder folder;
  const Descriptor file(
      open((folder / "a").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  std::vector<uint8_t> bytes(100'000);
  std::iota(bytes.begin(), bytes.end(), uint8_t{0});
  EXPECT_EQ(WriteFileAt(file.get(), 7, bytes), 0);
  std::vector<uint8_t> read(bytes.size());
  EXPECT_EQ(ReadFileAt(file.get(), 7, read), 0);
  EXPECT_EQ(read, bytes);
  EXPECT_EQ(ReadFileAt(file.get(), 8, read), EIO);
}

TEST(FileAccessTest, SaysWhatFails) {
  const Descriptor full(open("/dev/full", O_RDWR | O_CLOEXEC));
  std::array<uint8_t, 4> bytes{};
  EXPECT_EQ(WriteFileAt(full.get(), 0, bytes), ENOSPC);
  EXPECT_EQ(WriteFileAt(-1, 0, bytes), EBADF);
  EXPECT_EQ(ReadFileAt(-1, 0, bytes), EBADF);
}

TEST(FileAccessTest, KnowsThisProcesssLimit) {
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_TRUE(MayBeWritten(1000));
  EXPECT_FALSE(MayBeWritten(1001));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST(FileAccessTest, CallsAgainAfterASignal) {
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
