#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/error.h"
#include "model/family.h"
#include "ops/matmul.h"
#include "ops/recurrent.h"

namespace gkv {
namespace {

// Far above any model that exists, far below where size products overflow.
constexpr size_t kMaxSize = size_t{1} << 24;

void CheckRange(const char* name, size_t value, size_t low, size_t high) {
  if (value < low || value > high) {
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected ", low, "..", high));
  }
}

void CheckFinite(const char* name, double value, double low) {
  if (!std::isfinite(value) || value < low) {
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected a finite number >= ", low));
  }
}

void CheckArchitecture(std::string_view architecture) {
  if (FindFamily(architecture) != nullptr) return;
  std::string known;
  for (const Family& family : Families()) {
    known += StrCat(known.empty() ? "'" : ", '", family.architecture, "'");
  }
  throw InvalidArgument(StrCat("model config: architecture is '", architecture,
                               "', expected one of ", known));
}

void CheckRecurrent(const ModelConfig& config, bool has_layers) {
  CheckRange("lru_width", config.lru_width, has_layers,
             has_layers ? kMaxSize : 0);
  CheckRange("lru_blocks", config.lru_blocks, has_layers,
             has_layers ? config.lru_width : 0);
  CheckRange("conv_width", config.conv_width, has_layers,
             has_layers ? kMaxConvWidth : 0);
  if (!has_layers) return;
  // Weights of a block are whole groups of rows.
  if (config.lru_width % (config.lru_blocks * kRowGroup) != 0) {
    throw InvalidArgument(
        StrCat("model config: lru_width is ", config.lru_width, ", expected ",
               config.lru_blocks, " blocks of a multiple of ", kRowGroup));
  }
}

}  // namespace

float DefaultEmbeddingScale(size_t hidden_size) {
  return static_cast<float>(std::sqrt(static_cast<double>(hidden_size)));
}

std::vector<LayerKind> PeriodicLayerKinds(size_t num_layers, size_t period) {
  std::vector<LayerKind> kinds(num_layers);
  for (size_t i = 0; i < num_layers; ++i) {
    kinds[i] = i % period < period - 1 ? LayerKind::kSliding : LayerKind::kFull;
  }
  return kinds;
}

void ModelConfig::Validate() const {
  CheckArchitecture(architecture);
  CheckRange("hidden_size", hidden_size, 1, kMaxSize);
  CheckRange("num_layers", num_layers, 1, 4096);
  CheckRange("num_heads", num_heads, 1, 4096);
  CheckRange("kv_heads", kv_heads, 1, num_heads);
  CheckRange("head_dim", head_dim, 32, 512);
  CheckRange("ffn_dim", ffn_dim, 1, kMaxSize);
  CheckRange("vocab_size", vocab_size, 1, kMaxSize);
  CheckRange("context_length", context_length, 1, kMaxSize);
  if (num_heads % kv_heads != 0) {
    throw InvalidArgument(StrCat("model config: num_heads is ", num_heads,
                                 ", expected a multiple of kv_heads ",
                                 kv_heads));
  }
  if (head_dim % 32 != 0) {
    throw InvalidArgument(StrCat("model config: head_dim is ", head_dim,
                                 ", expected a multiple of 32"));
  }
  CheckRange("rope_dim", rope_dim, 2, head_dim);
  if (rope_dim % 2 != 0) {
    throw InvalidArgument(StrCat("model config: rope_dim is ", rope_dim,
                                 ", expected an even number"));
  }
  if (num_heads / kv_heads > 16) {
    throw InvalidArgument(StrCat("model config: ", num_heads / kv_heads,
                                 " query heads share a kv head, expected at "
                                 "most 16"));
  }
  if (layer_kinds.size() != num_layers) {
    throw InvalidArgument(StrCat("model config: layer_kinds has ",
                                 layer_kinds.size(), " entries, expected ",
                                 num_layers));
  }
  const bool slides = HasLayers(LayerKind::kSliding);
  if (slides) CheckRange("sliding_window", sliding_window, 1, kMaxSize);
  CheckRecurrent(*this, HasLayers(LayerKind::kRecurrent));
  CheckFinite("rms_epsilon", rms_epsilon, 0);
  CheckFinite("embedding_scale", embedding_scale, 0);
  CheckFinite("query_scale", query_scale, 0);
  CheckFinite("attn_soft_cap", attn_soft_cap, 0);
  CheckFinite("final_soft_cap", final_soft_cap, 0);
  if (HasLayers(LayerKind::kFull)) {
    CheckFinite("rope_base_full", rope_base_full, 1.001);
  }
  if (slides) CheckFinite("rope_base_sliding", rope_base_sliding, 1.001);
  CheckFinite("rope_factor_full", rope_factor_full, 1);
  for (const int32_t id : eos_ids) {
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("model config: eos id ", id,
                                   ", expected 0..", vocab_size - 1));
    }
  }
}

bool ModelConfig::HasLayers(LayerKind kind) const {
  return std::find(layer_kinds.begin(), layer_kinds.end(), kind) !=
         layer_kinds.end();
}

std::shared_ptr<const KvLayout> ModelConfig::MakeKvLayout(
    KvDtype dtype, size_t block_tokens) const {
  std::vector<KvLayerSpec> specs;
  for (const LayerKind kind : layer_kinds) {
    KvLayerSpec spec{.kind = kind};
    if (kind == LayerKind::kRecurrent) {
      spec.lru_width = lru_width;
      spec.conv_tail = conv_width - 1;
    } else {
      spec.kv_heads = kv_heads;
      spec.head_dim = head_dim;
      spec.window = kind == LayerKind::kSliding ? sliding_window : 0;
    }
    specs.push_back(spec);
  }
  return std::make_shared<KvLayout>(std::move(specs), dtype, block_tokens);
}

Hash128 ModelConfig::Hash() const {
  // What only layers of a kind read does not count without such layers.
  const auto has = [&](LayerKind kind) {
    return std::find(layer_kinds.begin(), layer_kinds.end(), kind) !=
           layer_kinds.end();
  };
  const bool slides = has(LayerKind::kSliding);
  const bool full = has(LayerKind::kFull);
  Hasher hasher;
  hasher.Update({reinterpret_cast<const uint8_t*>(architecture.data()),
                 architecture.size()});
  for (const size_t value :
       {hidden_size, num_layers, num_heads, kv_heads, head_dim, ffn_dim,
        vocab_size, slides ? sliding_window : 0}) {
    hasher.UpdateValue(static_cast<uint64_t>(value));
  }
  for (const LayerKind kind : layer_kinds) {
    hasher.UpdateValue(static_cast<uint32_t>(kind));
  }
  for (const double value :
       {static_cast<double>(rms_epsilon), query_scale,
        static_cast<double>(attn_soft_cap), static_cast<double>(final_soft_cap),
        full ? rope_base_full : 0, slides ? rope_base_sliding : 0,
        full ? rope_factor_full : 1, static_cast<double>(qk_norm),
        static_cast<double>(post_norms)}) {
    hasher.UpdateValue(value);
  }
  // What not every model has counts where it is there: it cannot be taken for
  // anything else, since its place in the sequence is marked.
  const auto add = [&](uint32_t mark, std::initializer_list<double> values) {
    hasher.UpdateValue(mark);
    for (const double value : values) hasher.UpdateValue(value);
  };
  const auto number = [](size_t value) { return static_cast<double>(value); };
  if (embedding_scale != DefaultEmbeddingScale(hidden_size)) {
    add(1, {static_cast<double>(embedding_scale)});
  }
  if (rope_dim != head_dim) add(2, {number(rope_dim)});
  if (biases) add(3, {});
  if (lru_width != 0) {
    add(4, {number(lru_width), number(lru_blocks), number(conv_width)});
  }
  return hasher.Finish();
}

bool ModelConfig::SameShape(const ModelConfig& other) const {
  ModelConfig padded = *this;
  padded.vocab_size = other.vocab_size;
  return padded.Hash() == other.Hash() &&
         context_length == other.context_length;
}

}  // namespace gkv
