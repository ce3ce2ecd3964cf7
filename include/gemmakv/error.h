#ifndef GEMMAKV_ERROR_H_
#define GEMMAKV_ERROR_H_

#include <exception>
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

  // Returns the same error with `more` after its message.
  virtual std::exception_ptr Continued(std::string_view more) const;
};

// The base of each kind of error except Error itself: Continued() keeps the
// kind.
template <class Kind>
class ErrorOf : public Error {
 public:
  using Error::Error;
  std::exception_ptr Continued(std::string_view more) const override {
    return std::make_exception_ptr(Kind(std::string(what()).append(more)));
  }
};

// An argument is out of its documented range.
class InvalidArgument : public ErrorOf<InvalidArgument> {
  using ErrorOf::ErrorOf;
};

// The operating system refused an operation on a file.
class IoError : public Error {
 public:
  // `error_number` is an errno value, or 0 if none applies.
  IoError(std::string_view message, int error_number, std::string path)
      : Error(message), error_number_(error_number), path_(std::move(path)) {}
  // Takes the system's words for the error at `path`.
  IoError(std::string path, int error_number);
  int error_number() const { return error_number_; }
  const std::string& path() const { return path_; }
  std::exception_ptr Continued(std::string_view more) const override;

 private:
  int error_number_;
  std::string path_;
};

// Bytes that claim to be of a known format are not.
class CorruptFile : public ErrorOf<CorruptFile> {
  using ErrorOf::ErrorOf;
};

// Two sound things do not belong together (cache and model, say).
class Mismatch : public ErrorOf<Mismatch> {
  using ErrorOf::ErrorOf;
};

// A conversation is at its capacity, or the block pool at its byte budget.
class CacheFull : public ErrorOf<CacheFull> {
  using ErrorOf::ErrorOf;
};

// A call would wait for something that may never come: the conversation's
// request waits for its reader, or the call comes from inside a step.
class Busy : public ErrorOf<Busy> {
  using ErrorOf::ErrorOf;
};

// More requests would wait than allowed.
class QueueFull : public ErrorOf<QueueFull> {
  using ErrorOf::ErrorOf;
};

}  // namespace gkv

#endif  // GEMMAKV_ERROR_H_
