#include "io/wake_pipe.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>

#include <cerrno>

#include "base/error.h"

namespace gkv {
namespace {

bool IsReadable(const WakePipe& wake) {
  struct pollfd wanted = {wake.descriptor(), POLLIN, 0};
  return poll(&wanted, 1, 0) == 1;
}

TEST(WakePipeTest, IsReadableWhileItIsFull) {
  WakePipe wake;
  EXPECT_FALSE(IsReadable(wake));
  for (int i = 0; i < 3; ++i) {
    wake.Fill();
    EXPECT_TRUE(IsReadable(wake));
    wake.Drain();
    EXPECT_FALSE(IsReadable(wake));
  }
  wake.Drain();  // waits for nothing
}

TEST(WakePipeTest, SaysThatNoDescriptorsAreLeft) {
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit none = {0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  int error = 0;
  try {
    WakePipe();
  } catch (const IoError& failed) {
    error = failed.error_number();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error, EMFILE);
}

}  // namespace
}  // namespace gkv
