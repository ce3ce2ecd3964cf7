#ifndef GEMMAKV_BASE_BLAKE2B_H_
#define GEMMAKV_BASE_BLAKE2B_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/bytes.h"

namespace gkv {

// BLAKE2b (RFC 7693): a cryptographic hash, and with a key a signature.
// Streaming: the digest depends on the concatenated bytes only.
class Blake2b {
 public:
  // `size_bytes` is the size of the digest, 1..64. A key has up to 64 bytes.
  explicit Blake2b(size_t size_bytes, std::span<const uint8_t> key = {});
  void Update(std::span<const uint8_t> bytes);
  template <typename T>
  void UpdateValue(const T& value) {
    static_assert(kIsPlain<T>);
    Update(AsBytes(std::span(&value, 1)));
  }
  // Writes the digest. Requires: out.size() is `size_bytes`; this is the last
  // call.
  void Finish(std::span<uint8_t> out);

 private:
  void Compress(bool last);

  static constexpr size_t kBlockBytes = 128;
  std::array<uint64_t, 8> state_;
  std::array<uint8_t, kBlockBytes> block_{};
  size_t filled_ = 0;
  uint64_t total_ = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_BLAKE2B_H_
