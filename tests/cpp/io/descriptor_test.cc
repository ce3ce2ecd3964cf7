#include "io/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <utility>

namespace gkv {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(DescriptorTest, ClosesWhatItHoldsOnce) {
  int fd = -1;
  {
    Descriptor first(open("/dev/null", O_RDONLY | O_CLOEXEC));
    fd = first.get();
    ASSERT_TRUE(first.is_open());
    ASSERT_TRUE(IsOpen(fd));
    {
      const Descriptor second(std::move(first));
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

TEST(DescriptorTest, NoneIsNotOpen) {
  EXPECT_FALSE(Descriptor(open("/nowhere/at/all", O_RDONLY)).is_open());
}

}  // namespace
}  // namespace gkv
