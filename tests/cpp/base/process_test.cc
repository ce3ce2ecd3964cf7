#include "base/process.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace gkv {
namespace {

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
