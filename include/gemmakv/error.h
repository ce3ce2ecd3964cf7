#ifndef GEMMAKV_ERROR_H_
#define GEMMAKV_ERROR_H_

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace gkv {

// Every failure that a caller can cause is one of these. A message is one line
// of UTF-8 that names the thing, what was found and what was expected.
class Error : public std::runtime_error {
 public:
  explicit Error(std::string_view message);
};

// An argument is out of its documented range.
class InvalidArgument : public Error {
  using Error::Error;
};

// The operating system refused an operation on a file.
class IoError : public Error {
 public:
  // `error_number` is an errno value, or 0 if none applies.
  IoError(std::string_view message, int error_number, std::string path)
      : Error(message), error_number_(error_number), path_(std::move(path)) {}
  // The system's own words for what happened at `path`.
  IoError(std::string path, int error_number);
  int error_number() const { return error_number_; }
  const std::string& path() const { return path_; }

 private:
  int error_number_;
  std::string path_;
};

// Bytes that claim to be of a known format are not.
class CorruptFile : public Error {
  using Error::Error;
};

// Two sound things do not belong together (cache and model, say).
class Mismatch : public Error {
  using Error::Error;
};

// A conversation is at its capacity, or the block pool at its byte budget.
class CacheFull : public Error {
  using Error::Error;
};

// A conversation is in use by something that waits for its reader.
class Busy : public Error {
  using Error::Error;
};

// More is asked for at once than somebody has allowed for.
class QueueFull : public Error {
  using Error::Error;
};

}  // namespace gkv

#endif  // GEMMAKV_ERROR_H_
