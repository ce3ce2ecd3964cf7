#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fault.h"
#include "io/temp_folder.h"
#include "store/chain_objects.h"
#include "store/folder_places.h"
#include "store/folder_store.h"

// Writers, readers and sweepers of one folder that are killed at any moment.
// GEMMAKV_KILLS says how many are to die; 10,000 take some minutes.

namespace gkv {
namespace {

constexpr int kWriters = 4;
constexpr int kWrongBytes = 3;
constexpr int kThrew = 4;
constexpr int kDamagedFile = 5;
constexpr uint64_t kBudget = 400'000;  // a part of all objects: sweeps are many

// Every place on the way that can be the last; * dies at some pass of any.
// The first three come once in a process.
constexpr const char* kPoints[] = {
    "folder-done",  "key",           "touch",  "subfolder-done", "opened",
    "half-written", "written",       "linked", "sweep-locked",   "sweep-unlink",
    "clear-unlink", "branch-unlink", "*"};
constexpr size_t kOncePoints = 3;

const std::vector<ChainObject>& Objects() {
  static const auto* const objects = [] {
    auto* const all = new std::vector<ChainObject>;
    for (const char* salt : {"", "tenant"}) {
      for (uint32_t seed = 0; seed < 3; ++seed) {
        for (auto& object : Chain(salt, seed, 3)) all->push_back(object);
      }
    }
    return all;
  }();
  return *objects;
}

// The life of one process; never returns.
[[noreturn]] void Work(const std::string& path, const FolderOptions& options,
                       const std::string& fault, uint32_t seed) {
  int code = 0;
  try {
    setenv("GEMMAKV_FAULT", fault.c_str(), 1);
    const auto store = OpenFolderStore(path, options);
    std::mt19937 random(seed);
    for (int i = 0; i < 60; ++i) {
      const size_t at = random() % Objects().size();
      const ChainObject& object = Objects()[at];
      const uint32_t what = random() % 100;
      if (what < 53) {
        store->Put(object.key, object.bytes);
      } else if (what < 88) {
        const Loaded loaded = store->Load(std::span(&object.key, 1))[0];
        if (loaded.state == LoadState::kHit &&
            !SameBytes(loaded.object.bytes, object.bytes.bytes)) {
          code = kWrongBytes;
          break;
        }
      } else if (what < 93) {
        store->Sweep();
      } else if (what < 96) {
        store->Remove(std::span(&object.key, 1));
      } else if (what < 98) {
        const ObjectHead head = ReadHead(object.bytes.bytes);
        store->RemoveBranch(
            {head.salt, head.parent, head.begin, {head.tokens[0]}, {}});
      } else {
        store->Clear(&object.key.salt);
      }
    }
    if (code == 0 && store->stats().damaged != 0) code = kDamagedFile;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = kThrew;
  }
  _exit(code);
}

struct Outcome {
  size_t killed = 0;
  size_t finished = 0;
  std::map<std::string, size_t> by_point;
};

// Four processes at once, of which all are to die when they pass `point` for
// the n-th time, n <= most, or, without one, by the parent's hand.
void Round(const std::string& path, const FolderOptions& options,
           std::mt19937& random, const char* point, uint32_t most, bool named,
           Outcome& outcome) {
  std::array<pid_t, kWriters> children;
  for (pid_t& child : children) {
    const uint32_t seed = random();
    std::string fault = named ? "unnamed:errno=95," : "";
    if (point == nullptr) {
      fault += "written:delay=1";
    } else {
      fault += StrCat(point, ":kill:", 1 + random() % most);
    }
    child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) Work(path, options, fault, seed);
  }
  if (point == nullptr) {
    for (const pid_t child : children) {
      usleep(random() % 3000);
      kill(child, SIGKILL);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    ASSERT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
        << "status " << status << " at " << (point ? point : "random");
    ++(killed ? outcome.killed : outcome.finished);
    if (killed) ++outcome.by_point[point ? point : "random"];
  }
}

// What is left is sound, and all of it is known.
void CheckWhatIsLeft(const std::string& path, const FolderOptions& options) {
  const auto store = OpenFolderStore(path, options);
  store->Sweep();
  EXPECT_TRUE(FilesOf(path, ".tmp-").empty());
  size_t hits = 0;
  for (const ChainObject& object : Objects()) {
    const Loaded loaded = store->Load(std::span(&object.key, 1))[0];
    if (loaded.state != LoadState::kHit) continue;
    ++hits;
    ASSERT_TRUE(SameBytes(loaded.object.bytes, object.bytes.bytes));
  }
  EXPECT_EQ(store->stats().damaged, 0u);
  // No file that is neither an object, nor the key, nor the lock.
  EXPECT_EQ(FilesOf(path).size(), hits + 2);
  EXPECT_LE(store->stats().bytes, kBudget);
}

void KillMany(const FolderOptions& options, const std::string& above,
              size_t kills) {
  const FolderAt folder(above);
  const std::string path = folder / "cache";
  std::mt19937 random(7);
  Outcome outcome;
  Objects();
  for (size_t round = 0; outcome.killed < kills; ++round) {
    const size_t which = round % (std::size(kPoints) + 4);
    const char* point = which < std::size(kPoints) ? kPoints[which] : nullptr;
    // Folders, keys and subfolders are made anew now and then.
    const bool once = which < kOncePoints;
    if (point == kPoints[2]) {
      const auto store = OpenFolderStore(path, options);
      for (const auto& object : Objects()) store->Put(object.key, object.bytes);
      for (const std::string& file : FilesOf(path)) SetUsed(file, -3600);
    } else if (once || round % 5 == 0) {
      std::filesystem::remove_all(path);
    }
    const uint32_t most = once ? 1 : point == std::end(kPoints)[-1] ? 120 : 8;
    Round(path, options, random, point, most, round % 2 == 1, outcome);
    if (testing::Test::HasFatalFailure()) return;
    CheckWhatIsLeft(path, options);
    if (testing::Test::HasFailure()) {
      FAIL() << "round " << round << " at " << (point ? point : "random");
    }
  }
  for (const char* point : kPoints) {
    if (kills >= 100) {
      EXPECT_GT(outcome.by_point[point], 0u) << point;
    }
  }
  std::printf("%zu killed, %zu finished", outcome.killed, outcome.finished);
  for (const auto& [point, count] : outcome.by_point) {
    std::printf(", %s %zu", point.c_str(), count);
  }
  std::printf("\n");
}

size_t Kills() {
  const char* const text = std::getenv("GEMMAKV_KILLS");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 300;
}

TEST(FolderKillTest, Shared) {
  KillMany({"shared", true, kBudget}, InMemory(), Kills() / 2);
}

TEST(FolderKillTest, Disk) {
  KillMany({"disk", false, kBudget}, OnDisk(), Kills() / 2);
}

// The folder is deleted over and over under writers that never stop.
TEST(FolderKillTest, TheFolderIsDeletedMeanwhile) {
  const FolderAt folder(InMemory());
  const std::string path = folder / "cache";
  const FolderOptions options{"shared", true, kBudget};
  std::array<pid_t, kWriters> children;
  Objects();
  for (pid_t& child : children) {
    child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Work(path, options, "written:delay=1", static_cast<uint32_t>(getpid()));
    }
  }
  for (int i = 0; i < 20; ++i) {
    usleep(3000);
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  CheckWhatIsLeft(path, options);
}

}  // namespace
}  // namespace gkv
