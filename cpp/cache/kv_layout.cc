#include "cache/kv_layout.h"

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "ops/kv_strip.h"

namespace gkv {
namespace {

constexpr size_t kMaxLayers = 4096;
constexpr size_t kMaxHeads = 4096;
constexpr size_t kMaxHeadDim = 4096;
constexpr size_t kMaxWindow = size_t{1} << 30;
constexpr size_t kMaxLruWidth = size_t{1} << 20;
constexpr size_t kMaxConvTail = 64;

void CheckSpec(size_t layer, const KvLayerSpec& spec) {
  const auto check = [&](const char* what, size_t value, size_t low,
                         size_t high) {
    if (value < low || value > high) {
      throw InvalidArgument(StrCat("layer ", layer, ": ", what, " is ", value,
                                   ", expected ", low, "..", high));
    }
  };
  const bool recurrent = spec.kind == LayerKind::kRecurrent;
  const bool sliding = spec.kind == LayerKind::kSliding;
  check("kv_heads", spec.kv_heads, !recurrent, recurrent ? 0 : kMaxHeads);
  check("head_dim", spec.head_dim, recurrent ? 0 : kKvInt8Block,
        recurrent ? 0 : kMaxHeadDim);
  if (spec.head_dim % kKvInt8Block != 0) {
    throw InvalidArgument(StrCat("layer ", layer, ": head_dim is ",
                                 spec.head_dim, ", expected a multiple of ",
                                 kKvInt8Block));
  }
  check("window", spec.window, sliding, sliding ? kMaxWindow : 0);
  check("lru_width", spec.lru_width, recurrent, recurrent ? kMaxLruWidth : 0);
  check("conv_tail", spec.conv_tail, 0, recurrent ? kMaxConvTail : 0);
}

size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

KvLayout::KvLayout(std::vector<KvLayerSpec> layers, KvDtype dtype,
                   size_t block_tokens)
    : layers_(std::move(layers)), dtype_(dtype), block_tokens_(block_tokens) {
  if (layers_.empty() || layers_.size() > kMaxLayers) {
    throw InvalidArgument(StrCat("number of layers is ", layers_.size(),
                                 ", expected 1..", kMaxLayers));
  }
  if (block_tokens < kKvGroup || block_tokens > 128 ||
      (block_tokens & (block_tokens - 1)) != 0) {
    throw InvalidArgument(StrCat("block_tokens is ", block_tokens,
                                 ", expected a power of two in 16..128"));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const KvLayerSpec& spec = layers_[i];
    CheckSpec(i, spec);
    if (spec.kind == LayerKind::kSliding) {
      if (window_ != 0 && window_ != spec.window) {
        throw InvalidArgument(StrCat("layer ", i, ": window is ", spec.window,
                                     ", expected ", window_,
                                     " as in the layers before"));
      }
      window_ = spec.window;
    }
    const size_t g = static_cast<size_t>(group(i));
    ++group_layers_[g];
    layer_offset_.push_back(block_bytes_[g]);
    block_bytes_[g] += spec.kind == LayerKind::kRecurrent
                           ? Aligned(state_floats(i) * sizeof(float))
                           : 2 * spec.kv_heads * strip_bytes(i);
  }
}

GroupId KvLayout::group(size_t layer) const {
  return static_cast<GroupId>(layers_[layer].kind);
}

bool KvLayout::has_group(GroupId group) const {
  return group_layers_[static_cast<size_t>(group)] > 0;
}

size_t KvLayout::block_bytes(GroupId group) const {
  return block_bytes_[static_cast<size_t>(group)];
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

size_t KvLayout::bytes_per_token(GroupId group) const {
  return block_bytes(group) / block_tokens_;
}

size_t KvLayout::bytes_at(size_t tokens) const {
  return tokens * bytes_per_token(GroupId::kFull) +
         std::min(tokens, window_) * bytes_per_token(GroupId::kSliding) +
         (tokens > 0 ? block_bytes(GroupId::kRecurrent) : 0);
}

size_t KvLayout::checkpoint_bytes() const {
  if (!has_group(GroupId::kSliding)) return block_bytes(GroupId::kRecurrent);
  // A window lies anywhere in its blocks.
  const size_t blocks = (window_ + block_tokens_ - 1) / block_tokens_ + 1;
  return blocks * block_bytes(GroupId::kSliding) +
         block_bytes(GroupId::kRecurrent);
}

Hash128 KvLayout::hash() const {
  Hasher hasher;
  hasher.UpdateValue(static_cast<uint32_t>(dtype_));
  for (const KvLayerSpec& spec : layers_) {
    hasher.UpdateValue(static_cast<uint32_t>(spec.kind));
    hasher.UpdateValue(static_cast<uint64_t>(spec.kv_heads));
    hasher.UpdateValue(static_cast<uint64_t>(spec.head_dim));
    hasher.UpdateValue(static_cast<uint64_t>(spec.window));
    if (spec.kind != LayerKind::kRecurrent) continue;
    hasher.UpdateValue(static_cast<uint64_t>(spec.lru_width));
    hasher.UpdateValue(static_cast<uint64_t>(spec.conv_tail));
  }
  return hasher.Finish();
}

}  // namespace gkv
