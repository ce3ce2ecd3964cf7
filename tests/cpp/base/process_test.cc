#include "base/process.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Control groups of another machine.
class ControlGroupsTest : public ::testing::Test {
 protected:
  ControlGroupsTest()
      : folder_(::testing::TempDir() + StrCat("groups.", getpid())) {
    std::filesystem::create_directories(folder_ + "/fs");
  }
  ~ControlGroupsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path(folder_ + "/" + name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  }
  ControlGroups Groups() const { return {folder_ + "/fs", folder_ + "/own"}; }
  // Returns the folders of its groups, as names below the root.
  std::vector<std::string> Folders(const char* controller) const {
    std::vector<std::string> names;
    for (const std::string& folder :
         ControlGroupFolders(Groups(), controller)) {
      names.push_back(folder.substr(Groups().root.size()));
    }
    return names;
  }

  const std::string folder_;
};

TEST_F(ControlGroupsTest, AreWalkedFromTheRoot) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(Folders(""), Names{""});
  Write("own", "4:memory:/m/n\n3:cpu,cpuacct:/c:d\n0::/a/b/c");
  EXPECT_EQ(Folders(""), (Names{"", "/a", "/a/b", "/a/b/c"}));
  EXPECT_EQ(Folders("memory"), (Names{"/memory", "/memory/m", "/memory/m/n"}));
  EXPECT_EQ(Folders("cpuacct"), (Names{"/cpuacct", "/cpuacct/c:d"}));
  EXPECT_EQ(Folders("pids"), Names{"/pids"});
  Write("own", "nonsense\n:\n0::/");
  EXPECT_EQ(Folders(""), Names{""});
  Write("own", "0::/../x");
  EXPECT_EQ(Folders(""), Names{""});
}

TEST_F(ControlGroupsTest, TheLowestLimitCounts) {
  const uint64_t machine = MemoryLimit(Groups());
  EXPECT_GT(machine, 3 * kMiB);
  Write("own", "0::/a/b");
  Write("fs/memory.max", "max");
  EXPECT_EQ(MemoryLimit(Groups()), machine);
  Write("fs/a/b/memory.max", std::to_string(3 * kMiB));
  EXPECT_EQ(MemoryLimit(Groups()), 3 * kMiB);
  Write("fs/a/memory.max", std::to_string(2 * kMiB));
  EXPECT_EQ(MemoryLimit(Groups()), 2 * kMiB);
  // The group of another process.
  Write("fs/x/memory.max", std::to_string(kMiB));
  EXPECT_EQ(MemoryLimit(Groups()), 2 * kMiB);
  // A container sees its own group at the root.
  Write("own", "0::/not/there");
  Write("fs/memory.max", std::to_string(kMiB));
  EXPECT_EQ(MemoryLimit(Groups()), kMiB);
}

TEST_F(ControlGroupsTest, VersionOneCountsToo) {
  Write("own", "9:cpuset,memory:/a\n0::/");
  Write("fs/memory/memory.limit_in_bytes", "9223372036854771712");
  const uint64_t machine = MemoryLimit(Groups());
  Write("fs/memory/a/memory.limit_in_bytes", std::to_string(2 * kMiB));
  EXPECT_EQ(MemoryLimit(Groups()), 2 * kMiB);
  EXPECT_GT(machine, 2 * kMiB);
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
