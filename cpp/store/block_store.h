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

// What a tier knows an object by. All of it follows from tokens: whoever asks
// can compute it.
struct ObjectKey {
  ObjectKind kind = ObjectKind::kPage;
  Address address;
  // The object that it hangs on, as in its header: of a page the one before, or
  // the root; of a window page the page; of a resume point the last whole page,
  // or the root. Zeros for models without full layers: they store no pages.
  Address parent;
  uint64_t end = 0;  // position behind its last token
  Address salt;      // digest
};

// All objects of conversations that begin with some tokens.
struct ObjectBranch {
  Address salt;  // digest
  // Of the page that the last of the tokens is in: its parent, first position,
  // and the tokens from there on, 1 to kPageTokens.
  Address parent;
  uint64_t begin = 0;
  std::vector<int32_t> tokens;
  // Of pages that are known to follow, that one first: models that store no
  // pages have nothing else that tells.
  std::vector<Address> pages;
};

// The bytes of one object (docs/block-store-format.md), and who keeps them.
struct StoredBytes {
  std::span<const uint8_t> bytes;  // begins at a multiple of 64
  std::shared_ptr<const void> owner;
  // They are a mapped file's: blocks may refer to them, and are not writable.
  bool mapped = false;
  // The tier has found both hashes right, in bytes that do not change: the
  // reader need not hash the payload again (DecodeHead's check_payload).
  bool checked = false;
};

enum class LoadState {
  kHit,
  kNotReady,  // it is there or on its way, and cannot be had now
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
  uint64_t damaged = 0;  // found, and not what they should be
  uint64_t entries = 0;
  uint64_t bytes = 0;
  uint64_t queued = 0;  // writes that are still to be done
  bool paused = false;  // writes failed a moment ago and are not tried now
};

// What a Clear came to.
enum class Cleared {
  kAll,
  kFailed,  // all or some of it is still there
  kUnable,  // the store cannot tell what it holds
};

// A tier below RAM: immutable objects by address, which may vanish at any
// time. Thread-safe. Nothing throws for what may happen to a medium: what fails
// is a miss, or is not stored. Calls may take as long as the medium does, and
// so come from the prefix cache's own threads where `blocks()` says so.
//
// One conformance suite, tests/cpp/store/block_store_conformance.h, which every
// tier instantiates.
class BlockStore {
 public:
  virtual ~BlockStore() = default;

  // "shared", "disk", "remote": the name in results and stats.
  virtual std::string_view tier() const = 0;
  // Whether a call may take longer than a fraction of a millisecond.
  virtual bool blocks() const = 0;

  // found[i]: 1 if keys[i] is there, else 0, as far as one question tells.
  // Requires: spans of one size.
  virtual void Has(std::span<const ObjectKey> keys,
                   std::span<uint8_t> found) noexcept = 0;
  // Parallel to `keys`. Touches what it gives: keys come leaf first.
  virtual std::vector<Loaded> Load(std::span<const ObjectKey> keys) = 0;
  // Takes the bytes over and stores them now or later; what is there already
  // stays. `object` is whole: header, hashes, payload.
  virtual void Put(const ObjectKey& key, StoredBytes object) = 0;
  // Absent ones are none of its business.
  virtual void Remove(std::span<const ObjectKey> keys) noexcept = 0;
  // Removes a branch, and says how many objects that were. Tiers that cannot
  // tell what begins with what keep it.
  virtual uint64_t RemoveBranch(const ObjectBranch& branch) noexcept {
    (void)branch;
    return 0;
  }
  // What the reader found to be damaged: removed if the tier agrees.
  virtual void Damaged(const ObjectKey& key) noexcept = 0;

  // What was put before is written, or has failed.
  virtual void Flush() noexcept = 0;
  // Removes all objects of a salt; a null pointer: all.
  virtual Cleared Clear(const Address* salt) noexcept = 0;
  virtual StoreStats stats() const = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_BLOCK_STORE_H_
