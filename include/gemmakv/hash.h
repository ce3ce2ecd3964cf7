#ifndef GEMMAKV_HASH_H_
#define GEMMAKV_HASH_H_

#include <compare>
#include <cstdint>
#include <string>

namespace gkv {

// A 128-bit content hash: the identity of weights, configurations and sealed
// blocks, and the checksum of stored bytes. Not cryptographic.
struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  auto operator<=>(const Hash128&) const = default;
  // 32 lowercase hex digits.
  std::string Hex() const;
};

}  // namespace gkv

#endif  // GEMMAKV_HASH_H_
