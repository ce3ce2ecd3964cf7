#ifndef GEMMAKV_BASE_HEX_H_
#define GEMMAKV_BASE_HEX_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

// Bytes and numbers as lowercase hex digits, and back.

namespace gkv {

// Two digits a byte, in the order of the bytes.
inline std::string ToHex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// Sixteen digits, the highest first.
inline std::string ToHex(uint64_t number) {
  uint8_t bytes[sizeof(number)];
  for (size_t i = 0; i < sizeof(bytes); ++i) {
    bytes[i] = static_cast<uint8_t>(number >> (56 - 8 * i));
  }
  return ToHex(std::span<const uint8_t>(bytes));
}

// Fills `bytes` from the text that ToHex returns for as many bytes. Returns
// false for any other text, also for one with capital digits.
inline bool ParseHex(std::string_view text, std::span<uint8_t> bytes) {
  if (text.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const size_t high = kDigits.find(text[2 * i]);
    const size_t low = kDigits.find(text[2 * i + 1]);
    if (high == kDigits.npos || low == kDigits.npos) return false;
    bytes[i] = static_cast<uint8_t>(high << 4 | low);
  }
  return true;
}

// The same for a number.
inline bool ParseHex(std::string_view text, uint64_t& number) {
  uint8_t bytes[sizeof(number)];
  if (!ParseHex(text, std::span<uint8_t>(bytes))) return false;
  number = 0;
  for (const uint8_t byte : bytes) number = number << 8 | byte;
  return true;
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_HEX_H_
