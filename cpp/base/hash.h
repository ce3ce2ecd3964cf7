#ifndef GEMMAKV_BASE_HASH_H_
#define GEMMAKV_BASE_HASH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/bytes.h"
#include "gemmakv/hash.h"

namespace gkv {

// A hash of 128 bits, which is not cryptographic. The result depends on the
// concatenated bytes only, not on how they were cut into Update calls, and is
// the same on every machine (the whole project assumes little-endian byte
// order). Hashes several GB/s.
class Hasher {
 public:
  explicit Hasher(uint64_t seed = 0);
  void Update(std::span<const uint8_t> bytes);
  template <typename T>
  void UpdateValue(const T& value) {
    static_assert(kIsPlain<T>);
    Update(AsBytes(std::span(&value, 1)));
  }
  // May be called at any time; further updates continue the stream.
  Hash128 Finish() const;

 private:
  void Mix(const uint8_t* blocks, size_t count);  // of kBlockBytes each

  static constexpr size_t kBlockBytes = 64;
  std::array<uint64_t, 8> lanes_;
  uint8_t tail_[kBlockBytes];
  size_t tail_size_ = 0;
  uint64_t total_ = 0;
};

Hash128 HashBytes(std::span<const uint8_t> bytes, uint64_t seed = 0);

}  // namespace gkv

#endif  // GEMMAKV_BASE_HASH_H_
