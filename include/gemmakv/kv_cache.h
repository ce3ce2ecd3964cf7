#ifndef GEMMAKV_KV_CACHE_H_
#define GEMMAKV_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gemmakv/config.h"
#include "gemmakv/hash.h"
#include "gemmakv/options.h"
#include "gemmakv/results.h"

namespace gkv {
inline namespace v0 {

// One conversation: its transcript, and the keys and values that a model has
// computed for it. Move-only; Fork() makes another that shares all blocks, each
// of which is copied before one of the two writes to it. Functions are safe
// from any thread; those that change the conversation wait for requests that
// run on it.
class KVCache {
 public:
  KVCache(KVCache&&) noexcept;
  KVCache& operator=(KVCache&&) noexcept;
  ~KVCache();

  // The name of the model that it was made for; empty for custom shapes.
  const std::string& model_type() const;
  size_t capacity_tokens() const;
  size_t length() const;  // tokens of the transcript
  std::vector<int32_t> tokens() const;
  // The bytes of blocks that are its own, and of blocks that it shares.
  size_t nbytes() const;
  size_t shared_nbytes() const;
  // The identity of the weights whose keys and values it holds; zero before
  // use.
  Hash128 fingerprint() const;

  // Returns a conversation with the same content. O(blocks); copies no key or
  // value.
  KVCache Fork() const;
  // Keeps the first `length` tokens. Always exact; returns what the next use
  // costs. Throws InvalidArgument if there are fewer tokens.
  Truncation Truncate(size_t length);
  // Keeps what is needed to truncate to the present length() at no cost.
  // Returns false if it does not fit CacheOptions::checkpoint_bytes.
  bool MakeCheckpoint();
  // Truncate(0); any model may use the conversation next.
  void Reset();

  // Write and restore the whole conversation. FromBytes throws CorruptFile for
  // bytes that are not a sound snapshot, Mismatch for a later format, CacheFull
  // if the pool has no room. Options that are not set are as they were saved.
  std::vector<uint8_t> ToBytes(bool checkpoints = false) const;
  static KVCache FromBytes(std::span<const uint8_t> bytes,
                           const CacheOptions& options = {});

 private:
  friend class Gemma;
  friend KVCache CreateKVCache(ModelType type, const CacheOptions& options);
  friend KVCache CreateKVCache(const ModelConfig& config,
                               const CacheOptions& options);
  struct Core;
  explicit KVCache(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

// Return an empty conversation for models of this shape. It needs no weights,
// and no memory before the first token. Throw InvalidArgument for an option
// that is out of range.
KVCache CreateKVCache(ModelType type, const CacheOptions& options = {});
KVCache CreateKVCache(const ModelConfig& config,
                      const CacheOptions& options = {});

// Returns a pool for CacheOptions::pool: all conversations that share it
// together take at most so many bytes of keys and values.
std::shared_ptr<BlockPool> CreateBlockPool(size_t budget_bytes);

}  // namespace v0
}  // namespace gkv

#endif  // GEMMAKV_KV_CACHE_H_
