#ifndef GEMMAKV_STORE_BLOCK_STORE_H_
#define GEMMAKV_STORE_BLOCK_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "store/address.h"

namespace gkv {

// The key by which tiers know an object. All of it follows from tokens, so any
// reader can compute it.
struct ObjectKey {
  ObjectKind kind = ObjectKind::kPage;
  Address address;
  // The address of the parent, as in the object's header: for a page the page
  // before, or the root; for a window page the page; for a resume point the
  // last whole page, or the root. Zeros for models without full layers: they
  // store no pages.
  Address parent;
  uint64_t end = 0;  // the position after its last token
  Address salt;      // digest
};

// All objects of conversations that begin with the same tokens.
struct ObjectBranch {
  Address salt;  // digest
  // The page that has the last of these tokens: its parent, its first position,
  // and the tokens from there on, 1 to kPageTokens.
  Address parent;
  uint64_t begin = 0;
  std::vector<int32_t> tokens;
  // The addresses of pages that are known to follow, that page first: the only
  // means to tell what belongs to the branch in models that store no pages.
  std::vector<Address> pages;
};

// The bytes of one object (docs/internals/block-store-format.md), and their
// owner.
struct StoredBytes {
  std::span<const uint8_t> bytes;  // begins at a multiple of 64
  std::shared_ptr<const void> owner;
  // The bytes are a mapped file's: blocks may refer to them, and are not
  // writable.
  bool mapped = false;
  // The tier has checked both hashes, in bytes that do not change: the reader
  // need not hash the payload again (DecodeHead's check_payload).
  bool checked = false;
};

enum class LoadState {
  kHit,
  kNotReady,  // it exists or is being written, but is not available now
  kMiss,
};

struct Loaded {
  LoadState state = LoadState::kMiss;
  StoredBytes object;  // if it is a hit; the reader has yet to check it
};

struct StoreStats {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t not_ready = 0;
  uint64_t writes = 0;
  uint64_t failed_writes = 0;
  uint64_t evictions = 0;
  uint64_t damaged = 0;  // objects that were found and were not sound
  uint64_t entries = 0;
  uint64_t bytes = 0;
  uint64_t queued = 0;  // writes that are not done yet
  bool paused = false;  // writes failed a moment ago and are refused now
};

// The result of a Clear.
enum class Cleared {
  kAll,
  kFailed,  // all or some of it is still there
  kUnable,  // the store cannot tell what it holds
};

// A tier below RAM: immutable objects by address, which may vanish at any time.
// Thread-safe. A failure of the medium never throws: it is a miss, or the
// object is not stored. Calls may take as long as the medium does; the prefix
// cache loads and writes on threads of its own.
//
// Every tier instantiates the conformance suite
// tests/cpp/store/block_store_conformance.h.
class BlockStore {
 public:
  virtual ~BlockStore() = default;

  // "shared", "disk", "remote": the name in results and stats.
  virtual std::string_view tier() const = 0;

  // Sets found[i] to 1 if keys[i] is there, else to 0, as far as one question
  // tells. Requires: spans of one size.
  virtual void Has(std::span<const ObjectKey> keys,
                   std::span<uint8_t> found) noexcept = 0;
  // Returns objects parallel to `keys`. Marks them as used: keys come leaf
  // first.
  virtual std::vector<Loaded> Load(std::span<const ObjectKey> keys) = 0;
  // Takes the bytes over and stores them now or later; an object that is there
  // already stays. `object` is whole: header, hashes, payload.
  virtual void Put(const ObjectKey& key, StoredBytes object) = 0;
  // Removes the objects. Keys without an object do nothing.
  virtual void Remove(std::span<const ObjectKey> keys) noexcept = 0;
  // Removes a branch, and returns the number of objects that were removed.
  // Tiers that cannot tell what begins with what keep it.
  virtual uint64_t RemoveBranch(const ObjectBranch& branch) noexcept {
    (void)branch;
    return 0;
  }
  // Says that the reader found the object damaged: the tier removes it if it
  // agrees.
  virtual void Damaged(const ObjectKey& key) noexcept = 0;

  // Returns when what was put before is written, or has failed.
  virtual void Flush() noexcept = 0;
  // Removes all objects of a salt; a null pointer: all.
  virtual Cleared Clear(const Address* salt) noexcept = 0;
  virtual StoreStats stats() const = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_BLOCK_STORE_H_
