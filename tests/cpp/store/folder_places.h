#ifndef GEMMAKV_TESTS_STORE_FOLDER_PLACES_H_
#define GEMMAKV_TESTS_STORE_FOLDER_PLACES_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "store/folder.h"

namespace gkv {

inline std::string OnDisk() { return testing::TempDir(); }
inline std::string InMemory() { return "/dev/shm/"; }

// An empty folder above others, gone with all that is in it when this is.
class FolderAt {
 public:
  explicit FolderAt(const std::string& above)
      : path_(above + "gemmakv_folder_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::runtime_error("cannot create " + path_);
    }
  }
  ~FolderAt() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  FolderAt(const FolderAt&) = delete;
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Where a folder keeps an object.
inline std::string FileOf(const std::string& folder, const ObjectKey& key) {
  return folder + "/" + Folder::Open(folder, false)->NameFor(key).Path();
}

inline void FlipByte(const std::string& path, size_t offset) {
  chmod(path.c_str(), 0600);
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ 8);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
    ASSERT_TRUE(file.good());
  }
  chmod(path.c_str(), 0400);
}

// When a file was last used, set to so many seconds from now.
inline void SetUsed(const std::string& path, int64_t seconds) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  now.tv_sec += seconds;
  const struct timespec times[2] = {now, now};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
}

// Seconds of the clock that marks files as used. time() reads one that is up to
// a tick behind, and so, for some milliseconds, in the second before.
inline int64_t SecondsNow() {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec;
}

// Paths below a folder of all files whose name begins so.
inline std::vector<std::string> FilesOf(const std::string& folder,
                                        const std::string& prefix = "") {
  std::vector<std::string> paths;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!entry.is_directory() && name.starts_with(prefix)) {
      paths.push_back(entry.path());
    }
  }
  return paths;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_FOLDER_PLACES_H_
