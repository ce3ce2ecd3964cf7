#ifndef GEMMAKV_CACHE_KV_LAYOUT_H_
#define GEMMAKV_CACHE_KV_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/kv_dtype.h"

namespace gkv {

enum class LayerKind : uint32_t {
  kFull = 0,     // every position stays visible
  kSliding = 1,  // a position sees itself and the `window` - 1 before it
};

struct KvLayerSpec {
  LayerKind kind;
  size_t kv_heads;
  size_t head_dim;  // multiple of 32
  size_t window;    // kSliding: in tokens, at least 1; kFull: 0
};

// Layers of one kind share one block table: a block of the group holds
// `block_tokens` positions of all its layers.
enum class GroupId : uint32_t { kFull = 0, kSliding = 1 };
inline constexpr size_t kNumGroups = 2;

// Where every key and value of a conversation lies. Derived from the shape of
// a model alone; the only place that does layout arithmetic. Immutable.
class KvLayout {
 public:
  // Throws InvalidArgument if `layers` is empty, a size is zero or out of
  // range, windows differ between sliding layers, or block_tokens is not a
  // power of two in [16, 128].
  KvLayout(std::vector<KvLayerSpec> layers, KvDtype dtype, size_t block_tokens);

  const std::vector<KvLayerSpec>& layers() const { return layers_; }
  KvDtype dtype() const { return dtype_; }
  size_t block_tokens() const { return block_tokens_; }
  size_t window() const { return window_; }  // 0 if no layer slides
  size_t num_sliding() const { return group_layers_[1]; }

  GroupId group(size_t layer) const;
  bool has_group(GroupId group) const;
  // Bytes of one block of a group; 0 if the model has no such layer.
  size_t block_bytes(GroupId group) const;
  // Byte offset of a strip inside a block of the layer's group.
  size_t key_offset(size_t layer, size_t kv_head) const;
  size_t value_offset(size_t layer, size_t kv_head) const;
  size_t strip_bytes(size_t layer) const;

  // Bytes that one more token adds in full layers, and in sliding layers
  // (those are held for at most about `window` tokens).
  size_t bytes_per_token(GroupId group) const;
  // KV bytes of a conversation of `tokens` tokens at rest.
  size_t bytes_at(size_t tokens) const;

  // Two layouts with the same hash store the same bytes for the same tokens.
  // block_tokens does not enter.
  Hash128 hash() const;

 private:
  std::vector<KvLayerSpec> layers_;
  KvDtype dtype_;
  size_t block_tokens_;
  size_t window_ = 0;
  size_t group_layers_[kNumGroups] = {};
  size_t block_bytes_[kNumGroups] = {};
  std::vector<size_t> layer_offset_;  // [layers], of kv head 0's key strip
};

}  // namespace gkv

#endif  // GEMMAKV_CACHE_KV_LAYOUT_H_
