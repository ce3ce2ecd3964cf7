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
// copied before one of the two writes to it. Methods are safe from any thread;
// those that change the conversation wait for what runs on it.
class KVCache {
 public:
  KVCache(KVCache&&) noexcept;
  KVCache& operator=(KVCache&&) noexcept;
  ~KVCache();

  // Name of the model that it was made for; empty for custom shapes.
  const std::string& model_type() const;
  size_t capacity_tokens() const;
  size_t length() const;  // tokens of the transcript
  std::vector<int32_t> tokens() const;
  // Bytes of blocks that are its own, and of those that forks share.
  size_t nbytes() const;
  size_t shared_nbytes() const;
  // Identity of the weights whose keys and values it holds; zero before use.
  Hash128 fingerprint() const;

  // O(blocks); copies no key or value.
  KVCache Fork() const;
  // Keeps the first `length` tokens: always exact, and says what it costs at
  // the next use. Throws InvalidArgument if there are fewer.
  Truncation Truncate(size_t length);
  // Keeps what truncating to the present length() at no cost takes. False if
  // it does not fit CacheOptions::checkpoint_bytes.
  bool MakeCheckpoint();
  // Truncate(0), and any model may use it next.
  void Reset();

  // The whole conversation, for any medium. FromBytes throws CorruptFile for
  // bytes that are not a sound snapshot, Mismatch for a later format,
  // CacheFull if the pool has no room. Options that are not set are
  // as saved.
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

// An empty conversation for models of this shape. Needs no weights, and no
// memory before the first token. Throws InvalidArgument for an option that is
// out of range.
KVCache CreateKVCache(ModelType type, const CacheOptions& options = {});
KVCache CreateKVCache(const ModelConfig& config,
                      const CacheOptions& options = {});

// For CacheOptions::pool: all conversations that share it together take at most
// so many bytes of keys and values.
std::shared_ptr<BlockPool> CreateBlockPool(size_t budget_bytes);

}  // namespace v0
}  // namespace gkv

#endif  // GEMMAKV_KV_CACHE_H_
