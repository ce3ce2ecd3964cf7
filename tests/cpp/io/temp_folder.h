#ifndef GEMMAKV_TESTS_CPP_IO_TEMP_FOLDER_H_
#define GEMMAKV_TESTS_CPP_IO_TEMP_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace gkv {

// An empty folder that is gone, with all that is in it, when this object is.
class TempFolder {
 public:
  TempFolder() : path_(testing::TempDir() + "gemmakv_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::runtime_error("cannot create " + path_);
    }
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  // Names of all that is in it.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

 private:
  std::string path_;
};

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void WriteWhole(const std::string& path, const std::string& content) {
  std::filesystem::remove(path);  // it may be read-only
  std::ofstream(path, std::ios::binary) << content;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_IO_TEMP_FOLDER_H_
