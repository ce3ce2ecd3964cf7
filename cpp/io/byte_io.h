#ifndef GEMMAKV_IO_BYTE_IO_H_
#define GEMMAKV_IO_BYTE_IO_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace gkv {

// Values in files and objects are little-endian, and are read and written as
// they lie in memory.
static_assert(std::endian::native == std::endian::little,
              "a little-endian processor is expected");

// Appends little-endian values to a growing byte string.
class ByteWriter {
 public:
  template <typename T>
  void Write(const T& value) {
    static_assert(kIsPlain<T>);
    WriteBytes(AsBytes(std::span(&value, 1)));
  }
  void WriteBytes(std::span<const uint8_t> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  size_t size() const { return bytes_.size(); }
  std::vector<uint8_t>& bytes() { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// Takes bytes in order, piece by piece. What it throws ends the writing.
using ByteSink = std::function<void(std::span<const uint8_t>)>;

// Reads little-endian values from bytes of unknown origin. Every read that
// would pass the end throws CorruptFile, with the offset and with `what` it was
// to read.
class ByteReader {
 public:
  // Requires: offset <= bytes.size().
  explicit ByteReader(std::span<const uint8_t> bytes, size_t offset = 0)
      : bytes_(bytes), offset_(offset) {}

  template <typename T>
  T Read(std::string_view what) {
    static_assert(kIsPlain<T>);
    return LoadUnaligned<T>(ReadBytes(sizeof(T), what).data());
  }
  std::span<const uint8_t> ReadBytes(uint64_t count, std::string_view what) {
    if (count > remaining()) {
      throw CorruptFile(StrCat("offset ", offset_, ": expected ", count,
                               " bytes of ", what, ", found ", remaining(),
                               " before the end"));
    }
    const std::span<const uint8_t> result = bytes_.subspan(offset_, count);
    offset_ += count;
    return result;
  }
  size_t offset() const { return offset_; }
  size_t remaining() const { return bytes_.size() - offset_; }

 private:
  std::span<const uint8_t> bytes_;
  size_t offset_;
};

}  // namespace gkv

#endif  // GEMMAKV_IO_BYTE_IO_H_
