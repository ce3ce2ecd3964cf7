#ifndef GEMMAKV_TESTS_CPP_IO_TEMP_FILE_H_
#define GEMMAKV_TESTS_CPP_IO_TEMP_FILE_H_

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>

#include "gtest/gtest.h"

namespace gkv {

// A file with the given bytes that is gone when this object is.
class TempFile {
 public:
  explicit TempFile(std::span<const uint8_t> bytes)
      : path_(testing::TempDir() + "gemmakv_XXXXXX") {
    const int fd = mkstemp(path_.data());
    if (fd < 0) throw std::runtime_error("cannot create " + path_);
    std::FILE* file = fdopen(fd, "wb");
    const size_t written =
        bytes.empty() ? 0 : std::fwrite(bytes.data(), 1, bytes.size(), file);
    if (std::fclose(file) != 0 || written != bytes.size()) {
      throw std::runtime_error("cannot write " + path_);
    }
  }
  ~TempFile() { std::remove(path_.c_str()); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_IO_TEMP_FILE_H_
