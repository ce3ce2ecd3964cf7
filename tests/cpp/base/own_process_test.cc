#include "base/own_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace gkv {
namespace {

// What `child` returns in a child of fork().
bool InChild(const auto& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child() ? 0 : 1);
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return status == 0;
}

TEST(OwnProcessTest, KnowsItsChildren) {
  const OwnProcess parent;
  EXPECT_FALSE(parent.InChild());
  EXPECT_TRUE(InChild([&] {
    const OwnProcess own;
    return parent.InChild() && !own.InChild() && InChild([&] {
             return parent.InChild() && own.InChild();
           });
  }));
  // A child leaves its parent as it was, and comes before no other one.
  EXPECT_FALSE(parent.InChild());
  EXPECT_TRUE(InChild([&] { return parent.InChild(); }));
}

}  // namespace
}  // namespace gkv
