#ifndef GEMMAKV_CACHE_KV_LAYOUT_H_
#define GEMMAKV_CACHE_KV_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"
#include "gemmakv/kv_dtype.h"
#include "gemmakv/layer_kind.h"

namespace gkv {

struct KvLayerSpec {
  LayerKind kind;
  // Attention layers; 0 in recurrent ones.
  size_t kv_heads = 0;
  size_t head_dim = 0;  // multiple of 32
  size_t window = 0;    // kSliding: in tokens, at least 1
  // Recurrent layers (RG-LRU, arXiv 2402.19427); 0 in attention layers. The
  // state is f32 whatever the KV dtype is: [1 + conv_tail, lru_width], first
  // the state of the recurrence, then the inputs of the last `conv_tail`
  // positions, which the temporal convolution looks back on, oldest first.
  size_t lru_width = 0;
  size_t conv_tail = 0;
  // Attention layers: an earlier layer of the same kind, window and shape whose
  // keys and values this one reads; it has none of its own.
  std::optional<size_t> shares = std::nullopt;
};

// The layers of one kind, and of one window if they slide, which move together.
// A block of an attention group holds `block_tokens` positions of all its
// layers; a block of the recurrent group holds the state of all its layers
// after one position.
struct KvGroup {
  LayerKind kind;
  size_t window;               // kSliding, else 0
  std::vector<size_t> layers;  // that store something, ascending
  size_t block_bytes = 0;
};

// Says where every key and value of a conversation lies. Derived from the shape
// of a model alone; the only place that does layout arithmetic. Immutable.
class KvLayout {
 public:
  // Throws InvalidArgument if `layers` is empty, a size is out of the range of
  // its kind, a layer shares what it cannot, or block_tokens is not a power of
  // two in [16, 128].
  KvLayout(std::vector<KvLayerSpec> layers, KvDtype dtype, size_t block_tokens);

  const std::vector<KvLayerSpec>& layers() const { return layers_; }
  KvDtype dtype() const { return dtype_; }
  size_t block_tokens() const { return block_tokens_; }

  // The groups in the order of their first layers. Everything else that is by
  // group is parallel to them.
  std::span<const KvGroup> groups() const { return groups_; }
  // The index of the group that stores what a layer reads.
  size_t group_of(size_t layer) const { return group_of_[layer]; }
  // Return the byte offset of a strip inside a block of the layer's group; if
  // the layer shares, of the strip that it reads. Requires: an attention layer.
  size_t key_offset(size_t layer, size_t kv_head) const;
  size_t value_offset(size_t layer, size_t kv_head) const;
  size_t strip_bytes(size_t layer) const;

  // Calls fn(block, from, to) for the parts of positions [begin, end) that lie
  // in one block each, ascending.
  template <typename Fn>
  void ForBlocks(size_t begin, size_t end, const Fn& fn) const {
    while (begin < end) {
      const size_t block = begin / block_tokens_;
      const size_t to = std::min(end, (block + 1) * block_tokens_);
      fn(block, begin, to);
      begin = to;
    }
  }

  // Return the byte offset of a recurrent layer's state inside a block of its
  // group, and the number of floats there. Requires: a recurrent layer.
  size_t state_offset(size_t layer) const { return layer_offset_[layer]; }
  size_t state_floats(size_t layer) const;

  // Returns the bytes that one more token adds in layers of an attention kind
  // (sliding layers hold it for at most about their window).
  size_t bytes_per_token(LayerKind kind) const;
  // Returns the bytes of the states of a conversation; 0 without recurrent
  // layers.
  size_t state_bytes() const;
  // Returns the bytes of a conversation of `tokens` tokens between two
  // requests. Throws InvalidArgument if the number of bytes would overflow.
  size_t bytes_at(size_t tokens) const;
  // Returns the bytes of a checkpoint that shares nothing with others: the
  // window of sliding layers and the state of recurrent ones. 0 if all layers
  // are full.
  size_t checkpoint_bytes() const;

  // Two layouts with the same hash store the same bytes for the same tokens.
  // The hash does not depend on block_tokens.
  Hash128 hash() const;

 private:
  std::vector<KvLayerSpec> layers_;
  KvDtype dtype_;
  size_t block_tokens_;
  std::vector<KvGroup> groups_;
  std::vector<size_t> group_of_;      // [layers]
  std::vector<size_t> layer_offset_;  // [layers], of its first byte
};

// Returns the first difference of two layouts, as in "layer 2: head_dim is 32,
// expected 64"; "" if they have the same hash.
std::string FirstDifference(const KvLayout& found, const KvLayout& expected);

}  // namespace gkv

#endif  // GEMMAKV_CACHE_KV_LAYOUT_H_
