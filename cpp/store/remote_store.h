#ifndef GEMMAKV_STORE_REMOTE_STORE_H_
#define GEMMAKV_STORE_REMOTE_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/block_store.h"
#include "store/remote_calls.h"

namespace gkv {

// The bytes of a value, and their owner.
struct RemoteValue {
  std::span<const uint8_t> bytes;
  std::shared_ptr<const void> owner;
};

struct RemoteItem {
  std::string key;
  RemoteValue value;
};

// A store of bytes by keys. Called by several threads of the RemoteStore at
// once. Throws a std::exception for a failure, including a wrong number of
// results.
class RemoteClient {
 public:
  virtual ~RemoteClient() = default;
  // Returns values parallel to `keys`; none for a key that is absent.
  virtual std::vector<std::optional<RemoteValue>> GetMany(
      std::span<const std::string> keys) = 0;
  virtual void PutMany(std::span<const RemoteItem> items) = 0;
  // Parallel to `keys`.
  virtual std::vector<bool> HasMany(std::span<const std::string> keys) = 0;

  // A client may lack these functions: then they do nothing.
  virtual void DeleteMany(std::span<const std::string> keys) = 0;
  // Deletes some of the keys that begin with `prefix`; false if none is left.
  virtual bool DeleteSome(const std::string& prefix) = 0;
  // Whether it has DeleteSome.
  virtual bool can_clear() const { return true; }
};

struct RemoteOptions {
  // The key that signs values and makes their names; empty: values are not
  // signed, and their writers must be trusted.
  std::vector<uint8_t> secret;
  RemoteCallOptions calls;
  uint64_t max_object_bytes = uint64_t{1} << 30;
};

// Values are cut into pieces of this size.
inline constexpr size_t kRemoteChunkBytes = size_t{4} << 20;

// Stores objects as remote values: docs/internals/block-store-format.md. A call
// takes at most the time-out, a Put one time-out for each 16 MiB that it
// writes. What is late, fails, or is not what was written is a miss; while the
// remote is dead, every call is one at once. entries, bytes and evictions are
// not known: 0.
class RemoteStore : public BlockStore {
 public:
  std::string_view tier() const override { return "remote"; }
  virtual RemoteCallStats call_stats() const = 0;
};

std::shared_ptr<RemoteStore> MakeRemoteStore(
    std::shared_ptr<RemoteClient> client, RemoteOptions options);

}  // namespace gkv

#endif  // GEMMAKV_STORE_REMOTE_STORE_H_
