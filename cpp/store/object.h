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

// Objects as bytes: docs/block-store-format.md.

namespace gkv {

// Of the sliding layers of one window: a resume point at p holds [from, p). It
// stores [from, own) itself, and what lies behind the last whole page.
struct SlidingRange {
  uint64_t window = 0;
  uint64_t from = 0;
  uint64_t own = 0;
  bool operator==(const SlidingRange&) const = default;
};

// What a resume point at `position` stores of a group that holds positions from
// `held_begin` on: as little as it can. Requires: it holds the window there.
SlidingRange SlidingRangeAt(size_t window, size_t held_begin, size_t position);

// What an object says of itself.
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

  // Two that differ in nothing but `sliding` are equal: who expects an object
  // knows all but that.
  bool operator==(const ObjectHead& other) const;
};

// The whole object, hashes included. Requires: `held`, in blocks of `layout`,
// has what the kind stores. Throws std::bad_alloc.
StoredBytes EncodeObject(const ObjectHead& head, const KvLayout& layout,
                         const HeldSet& held);

// What bytes of unknown origin say, once both hashes are right and everything
// else that can be known without a layout. Throws CorruptFile, or Mismatch for
// another format version. `check_payload`: false if its hash was right before.
ObjectHead ReadHead(std::span<const uint8_t> object, bool check_payload = true);

// The same of the first bytes of an object of `size` bytes, which hold its whole
// head; the payload is not looked at.
ObjectHead ReadHeadOf(std::span<const uint8_t> first, uint64_t size);

// The address that follows from a head. Requires: it is what ReadHead gave.
Address AddressOf(const ObjectHead& head);

// The same for a model of that layout, once every length is right too. Throws
// Mismatch for another layout as well.
ObjectHead DecodeHead(std::span<const uint8_t> object, const KvLayout& layout,
                      bool check_payload = true);

// The blocks of an object in blocks of `layout`: the mapping's own where it is
// mapped and sizes are equal, else copies from `pool`. Requires: `head` is what
// DecodeHead gave. Throws CacheFull, std::bad_alloc.
HeldSet DecodeBlocks(const StoredBytes& object, const ObjectHead& head,
                     const KvLayout& layout, BlockPool& pool);

}  // namespace gkv

#endif  // GEMMAKV_STORE_OBJECT_H_
