#ifndef GEMMAKV_STORE_ADDRESS_H_
#define GEMMAKV_STORE_ADDRESS_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"

// Addresses and names of stored objects. docs/internals/block-store-format.md
// describes every byte that is hashed.

namespace gkv {

// The number of positions of a page.
inline constexpr size_t kPageTokens = 256;
// `block_tokens` of the blocks inside objects.
inline constexpr size_t kStoredBlockTokens = 64;
inline constexpr uint32_t kBlockStoreVersion = 1;

enum class ObjectKind : uint32_t { kPage = 1, kWindowPage = 2, kResume = 3 };

// The BLAKE2b-256 hash of everything that an object follows from.
struct Address {
  std::array<uint8_t, 32> bytes{};
  auto operator<=>(const Address&) const = default;
};

// The BLAKE2b-128 hash of an address under the key of one store.
struct ObjectName {
  std::array<uint8_t, 16> bytes{};
  auto operator<=>(const ObjectName&) const = default;
  // 32 lowercase hex digits.
  std::string Hex() const;
};

// The digest of a salt; zeros if it is empty.
Address SaltDigest(std::span<const uint8_t> salt);
Address RootAddress(const Hash128& fingerprint, const Hash128& layout,
                    const Address& salt_digest);
// Requires: kPageTokens tokens.
Address PageAddress(const Address& parent, std::span<const int32_t> tokens);
Address WindowAddress(const Address& page, size_t window);
// `tail` are the tokens after the last whole page; `parent` is the address of
// that page, or the root. Requires: tail.size() == position % kPageTokens.
Address ResumeAddress(const Address& parent, size_t position,
                      std::span<const int32_t> tail);

ObjectName NameOf(const Address& address, std::span<const uint8_t, 32> key);

// Returns positions within (0, limit] at which resume points may be,
// descending, the `count` largest: page boundaries, positions after a token
// that ends a turn and before it, and `boundaries`. Pure; version 1 of the
// format.
std::vector<size_t> ResumeCandidates(std::span<const int32_t> tokens,
                                     std::span<const int32_t> turn_ends,
                                     std::span<const size_t> boundaries,
                                     size_t limit, size_t count = 512);

}  // namespace gkv

#endif  // GEMMAKV_STORE_ADDRESS_H_
