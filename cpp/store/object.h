#ifndef GEMMAKV_STORE_OBJECT_H_
#define GEMMAKV_STORE_OBJECT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_copy.h"
#include "cache/kv_layout.h"
#include "store/address.h"
#include "store/block_store.h"

// Objects as bytes: docs/internals/block-store-format.md.

namespace gkv {

// The positions that a resume point at p holds for the sliding layers of one
// window: [from, p). It stores [from, own) itself, and the positions after the
// last whole page; window pages have the rest.
struct SlidingRange {
  uint64_t window = 0;
  uint64_t from = 0;
  uint64_t own = 0;
  bool operator==(const SlidingRange&) const = default;
};

// Returns the range that a resume point at `position` stores of a group that
// holds positions from `held_begin` on: as little as it can. Requires: the
// group holds the window there.
SlidingRange SlidingRangeAt(size_t window, size_t held_begin, size_t position);

// The header of an object.
struct ObjectHead {
  ObjectKind kind = ObjectKind::kPage;
  Hash128 fingerprint;
  Hash128 layout;  // KvLayout::hash()
  Address salt;    // digest
  Address parent;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t window = 0;               // kWindowPage
  std::vector<int32_t> tokens;       // end - begin
  std::vector<SlidingRange> sliding;  // kResume: one a window, ascending

  // Ignores `sliding`, which a reader that expects an object does not know.
  bool operator==(const ObjectHead& other) const;
};

// Returns the whole object, hashes included. Requires: `held`, in blocks of
// `layout`, has what the kind stores. Throws std::bad_alloc.
StoredBytes EncodeObject(const ObjectHead& head, const KvLayout& layout,
                         const HeldSet& held);

// Reads the head of bytes of unknown origin, and checks both hashes and
// everything else that can be known without a layout. Throws CorruptFile, or
// Mismatch for another format version. `check_payload`: false if its hash was
// right before.
ObjectHead ReadHead(std::span<const uint8_t> object, bool check_payload = true);

// Reads the head from the first bytes of an object of `size` bytes, which
// contain the whole head; does not look at the payload.
ObjectHead ReadHeadOf(std::span<const uint8_t> first, uint64_t size);

// Returns the address that follows from a head. Requires: a head of ReadHead.
Address AddressOf(const ObjectHead& head);

// As ReadHead, for a model of that layout: checks every length, too. Throws
// Mismatch for another layout as well.
ObjectHead DecodeHead(std::span<const uint8_t> object, const KvLayout& layout,
                      bool check_payload = true);

// Returns the content of an object in blocks of `layout`: in the mapping's own
// bytes if it is mapped and block sizes are equal, else in copies from `pool`.
// Requires: `head` is from DecodeHead. Throws CacheFull, std::bad_alloc.
HeldSet DecodeBlocks(const StoredBytes& object, const ObjectHead& head,
                     const KvLayout& layout, BlockPool& pool);

}  // namespace gkv

#endif  // GEMMAKV_STORE_OBJECT_H_
