#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/hex.h"

namespace gkv {
namespace {

bool IsContinuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

// Returns the length of the well-formed UTF-8 sequence (Unicode 15, table 3-7)
// that `text` starts with; 0 if there is none.
size_t SequenceLength(std::string_view text) {
  const auto at = [&](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  const uint8_t lead = at(0), second = at(1);
  if (lead < 0x80) return 1;
  if (!IsContinuation(second)) return 0;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool overlong = lead == 0xE0 && second < 0xA0;
    const bool surrogate = lead == 0xED && second >= 0xA0;
    return !overlong && !surrogate && IsContinuation(at(2)) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && second < 0x90;
    const bool too_high = lead == 0xF4 && second >= 0x90;
    const bool tail = IsContinuation(at(2)) && IsContinuation(at(3));
    return !overlong && !too_high && tail ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string OneLine(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto byte = static_cast<uint8_t>(text[0]);
    const size_t length = SequenceLength(text);
    if (length > 1 || (length == 1 && byte >= 0x20 && byte != 0x7F)) {
      out += text.substr(0, length);
      text.remove_prefix(length);
      continue;
    }
    out += "\\x" + ToHex({&byte, 1});
    text.remove_prefix(1);
  }
  return out;
}

Error::Error(std::string_view message)
    : std::runtime_error(OneLine(message)) {}

std::exception_ptr Error::Continued(std::string_view more) const {
  return std::make_exception_ptr(Error(StrCat(what(), more)));
}

std::exception_ptr IoError::Continued(std::string_view more) const {
  return std::make_exception_ptr(
      IoError(StrCat(what(), more), error_number_, path_));
}

IoError::IoError(std::string path, int error_number)
    : IoError(StrCat(path, ": ", std::strerror(error_number)), error_number,
              path) {}

}  // namespace gkv
