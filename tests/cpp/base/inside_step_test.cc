#include "base/inside_step.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace gkv {
namespace {

TEST(InsideStepTest, IsOfOneThreadForAsLongAsItLives) {
  const int one = 0, other = 0;
  EXPECT_EQ(InsideStep::Runner(), nullptr);
  {
    const InsideStep outer(&one);
    EXPECT_EQ(InsideStep::Runner(), &one);
    {
      const InsideStep inner(&other);
      EXPECT_EQ(InsideStep::Runner(), &other);
    }
    EXPECT_EQ(InsideStep::Runner(), &one);
    const void* elsewhere = &one;
    std::thread([&] { elsewhere = InsideStep::Runner(); }).join();
    EXPECT_EQ(elsewhere, nullptr);
  }
  EXPECT_EQ(InsideStep::Runner(), nullptr);
}

TEST(InsideStepTest, AChildIsInsideNoStep) {
  const int one = 0;
  const InsideStep outer(&one);
  const InsideStep inner(&one);
  const pid_t child = fork();
  if (child == 0) {
    bool right = InsideStep::Runner() == nullptr;
    {
      const InsideStep own(&right);
      right = right && InsideStep::Runner() == &right;
    }
    _exit(right && InsideStep::Runner() == nullptr ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(InsideStep::Runner(), &one);
}

}  // namespace
}  // namespace gkv
