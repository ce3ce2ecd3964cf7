#include "base/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace gkv {
namespace {

TEST(ProcessTest, AChildHasAnotherId) {
  const int parent = ProcessId();
  EXPECT_EQ(parent, ProcessId());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(ProcessId() == parent);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ProcessTest, SaysWhatThereIs) {
  EXPECT_EQ(UserId(), geteuid());
  EXPECT_GE(PageBytes(), 4096u);
  EXPECT_EQ(PageBytes() & (PageBytes() - 1), 0u);
  EXPECT_GT(MemoryLimit(), PageBytes());
  for (const int level : {1, 2, 3}) {
    EXPECT_LT(ProcessorCacheBytes(level), size_t{1} << 40);
  }
}

}  // namespace
}  // namespace gkv
