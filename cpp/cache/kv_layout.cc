#include "cache/kv_layout.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/rounding.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

constexpr size_t kMaxLayers = 4096;
constexpr size_t kMaxHeads = 4096;
constexpr size_t kMaxHeadDim = 4096;
constexpr size_t kMaxWindow = size_t{1} << 30;
constexpr size_t kMaxLruWidth = size_t{1} << 20;
constexpr size_t kMaxConvTail = 64;
// Marks a sharing layer in a hash, in place of a layer's kind.
constexpr uint32_t kShares = 0xFFFFFFFF;

void CheckSpec(size_t layer, const KvLayerSpec& spec) {
  const auto check = [&](const char* what, size_t value, size_t low,
                         size_t high) {
    CheckRange(value, low, high, "layer ", layer, ": ", what);
  };
  const bool recurrent = spec.kind == LayerKind::kRecurrent;
  const bool sliding = spec.kind == LayerKind::kSliding;
  check("kv_heads", spec.kv_heads, !recurrent, recurrent ? 0 : kMaxHeads);
  check("head_dim", spec.head_dim, recurrent ? 0 : kKvInt8Block,
        recurrent ? 0 : kMaxHeadDim);
  if (spec.head_dim % kKvInt8Block != 0) {
    throw InvalidArgument(Unexpected(StrCat("layer ", layer, ": head_dim"),
                                     StrCat("a multiple of ", kKvInt8Block),
                                     spec.head_dim));
  }
  check("window", spec.window, sliding, sliding ? kMaxWindow : 0);
  check("lru_width", spec.lru_width, recurrent, recurrent ? kMaxLruWidth : 0);
  check("conv_tail", spec.conv_tail, 0, recurrent ? kMaxConvTail : 0);
}

// Throws unless a layer reads what an earlier one of the same kind and shape
// stores.
void CheckShares(size_t layer, const std::vector<KvLayerSpec>& layers) {
  const KvLayerSpec& spec = layers[layer];
  const size_t owner = *spec.shares;
  if (owner >= layer || layers[owner].shares ||
      spec.kind == LayerKind::kRecurrent || spec.kind != layers[owner].kind ||
      spec.window != layers[owner].window ||
      spec.kv_heads != layers[owner].kv_heads ||
      spec.head_dim != layers[owner].head_dim) {
    throw InvalidArgument(
        StrCat("layer ", layer, ": it shares the keys and values of layer ",
               owner, ", expected an earlier attention layer of the same kind, "
               "window, kv_heads and head_dim that has its own"));
  }
}

constexpr const char* kKinds[] = {"full", "sliding", "recurrent"};
constexpr const char* kDtypes[] = {"f32", "bf16", "int8"};

}  // namespace

KvLayout::KvLayout(std::vector<KvLayerSpec> layers, KvDtype dtype,
                   size_t block_tokens)
    : layers_(std::move(layers)), dtype_(dtype), block_tokens_(block_tokens) {
  CheckRange(layers_.size(), 1, kMaxLayers, "number of layers");
  if (block_tokens < kKvGroup || block_tokens > 128 ||
      (block_tokens & (block_tokens - 1)) != 0) {
    throw InvalidArgument(Unexpected(
        "block_tokens", "a power of two in 16..128", block_tokens));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const KvLayerSpec& spec = layers_[i];
    CheckSpec(i, spec);
    if (spec.shares) {
      CheckShares(i, layers_);
      group_of_.push_back(group_of_[*spec.shares]);
      layer_offset_.push_back(layer_offset_[*spec.shares]);
      continue;
    }
    const auto group =
        std::find_if(groups_.begin(), groups_.end(), [&](const KvGroup& g) {
          return g.kind == spec.kind && g.window == spec.window;
        });
    const auto g = static_cast<size_t>(group - groups_.begin());
    if (group == groups_.end()) groups_.push_back({spec.kind, spec.window, {}});
    group_of_.push_back(g);
    layer_offset_.push_back(groups_[g].block_bytes);
    groups_[g].layers.push_back(i);
    groups_[g].block_bytes += spec.kind == LayerKind::kRecurrent
                                  ? RoundUp(state_floats(i) * sizeof(float),
                                            kAlignment)
                                  : 2 * spec.kv_heads * strip_bytes(i);
  }
}

size_t KvLayout::key_offset(size_t layer, size_t kv_head) const {
  return layer_offset_[layer] + 2 * kv_head * strip_bytes(layer);
}

size_t KvLayout::value_offset(size_t layer, size_t kv_head) const {
  return key_offset(layer, kv_head) + strip_bytes(layer);
}

size_t KvLayout::strip_bytes(size_t layer) const {
  return KvStripBytes(dtype_, block_tokens_, layers_[layer].head_dim);
}

size_t KvLayout::state_floats(size_t layer) const {
  return (1 + layers_[layer].conv_tail) * layers_[layer].lru_width;
}

size_t KvLayout::bytes_per_token(LayerKind kind) const {
  size_t bytes = 0;
  for (const KvGroup& group : groups_) {
    if (group.kind == kind) bytes += group.block_bytes / block_tokens_;
  }
  return bytes;
}

size_t KvLayout::state_bytes() const {
  for (const KvGroup& group : groups_) {
    if (group.kind == LayerKind::kRecurrent) return group.block_bytes;
  }
  return 0;
}

size_t KvLayout::bytes_at(size_t tokens) const {
  const size_t of_token =
      std::max<size_t>(1, bytes_per_token(LayerKind::kFull) +
                              bytes_per_token(LayerKind::kSliding));
  CheckRange(tokens, 0, (SIZE_MAX - state_bytes()) / of_token, "tokens");
  size_t bytes = tokens > 0 ? state_bytes() : 0;
  for (const KvGroup& group : groups_) {
    if (group.kind == LayerKind::kRecurrent) continue;
    const size_t held =
        group.window != 0 ? std::min(tokens, group.window) : tokens;
    bytes += held * (group.block_bytes / block_tokens_);
  }
  return bytes;
}

size_t KvLayout::checkpoint_bytes() const {
  size_t bytes = state_bytes();
  for (const KvGroup& group : groups_) {
    if (group.kind != LayerKind::kSliding) continue;
    // A window may begin anywhere in a block.
    bytes += (CeilDiv(group.window, block_tokens_) + 1) * group.block_bytes;
  }
  return bytes;
}

Hash128 KvLayout::hash() const {
  Hasher hasher;
  hasher.UpdateValue(static_cast<uint32_t>(dtype_));
  for (const KvLayerSpec& spec : layers_) {
    hasher.UpdateValue(static_cast<uint32_t>(spec.kind));
    hasher.UpdateValue(static_cast<uint64_t>(spec.kv_heads));
    hasher.UpdateValue(static_cast<uint64_t>(spec.head_dim));
    hasher.UpdateValue(static_cast<uint64_t>(spec.window));
    if (spec.shares) {
      hasher.UpdateValue(kShares);
      hasher.UpdateValue(static_cast<uint64_t>(*spec.shares));
    }
    if (spec.kind != LayerKind::kRecurrent) continue;
    hasher.UpdateValue(static_cast<uint64_t>(spec.lru_width));
    hasher.UpdateValue(static_cast<uint64_t>(spec.conv_tail));
  }
  return hasher.Finish();
}

std::string FirstDifference(const KvLayout& found, const KvLayout& expected) {
  if (found.dtype() != expected.dtype()) {
    return StrCat("its dtype is ", kDtypes[static_cast<size_t>(found.dtype())],
                  ", expected ",
                  kDtypes[static_cast<size_t>(expected.dtype())]);
  }
  const size_t layers = expected.layers().size();
  if (found.layers().size() != layers) {
    return StrCat("it has ", found.layers().size(), " layers, expected ",
                  layers);
  }
  for (size_t i = 0; i < layers; ++i) {
    const KvLayerSpec& a = found.layers()[i];
    const KvLayerSpec& b = expected.layers()[i];
    if (a.kind != b.kind) {
      return StrCat("layer ", i, ": it is ",
                    kKinds[static_cast<size_t>(a.kind)], ", expected ",
                    kKinds[static_cast<size_t>(b.kind)]);
    }
    const struct {
      const char* name;
      size_t found, expected;
    } fields[] = {{"kv_heads", a.kv_heads, b.kv_heads},
                  {"head_dim", a.head_dim, b.head_dim},
                  {"window", a.window, b.window},
                  {"lru_width", a.lru_width, b.lru_width},
                  {"conv_tail", a.conv_tail, b.conv_tail}};
    for (const auto& field : fields) {
      if (field.found != field.expected) {
        return StrCat("layer ", i, ": ", field.name, " is ", field.found,
                      ", expected ", field.expected);
      }
    }
    if (a.shares == b.shares) continue;
    const auto owner = [](const KvLayerSpec& spec) {
      return spec.shares ? StrCat("of layer ", *spec.shares)
                         : std::string("of its own");
    };
    return StrCat("layer ", i, ": its keys and values are ", owner(a),
                  ", expected ", owner(b));
  }
  return "";
}

}  // namespace gkv
