#include "model/config/family.h"

#include <algorithm>

#include "base/error.h"
#include "base/float16.h"
#include "model/config/fields.h"

namespace gkv {
namespace {

constexpr LayerKind kFull = LayerKind::kFull;
constexpr LayerKind kSliding = LayerKind::kSliding;
constexpr LayerKind kRecurrent = LayerKind::kRecurrent;

constexpr LayerKind kGemmaPattern[] = {kFull};
constexpr LayerKind kGemma2Pattern[] = {kSliding, kFull};
constexpr LayerKind kGemma3Pattern[] = {kSliding, kSliding, kSliding,
                                        kSliding, kSliding, kFull};
constexpr LayerKind kGemma3nPattern[] = {kSliding, kSliding, kSliding,
                                         kSliding, kFull};
constexpr LayerKind kDrafterPattern[] = {kSliding, kSliding, kSliding, kFull};
constexpr LayerKind kRecurrentPattern[] = {kRecurrent, kRecurrent, kSliding};

// 5% of a normal distribution lie above this, in float32 as files state it.
constexpr double kCutoffOf95Percent = 1.6448535919189453f;

// Technical reports: arXiv 2403.08295, 2408.00118, 2503.19786 and 2404.07839;
// VaultGemma: 2510.15001.
constexpr Family kFamilies[] = {
    {
        .architecture = "gemma",
        .pattern = kGemmaPattern,
        .rope_base_full = 1e4,
    },
    {
        .architecture = "gemma2",
        .pattern = kGemma2Pattern,
        .sliding_window = 4096,
        .post_norms = true,
        .attn_soft_cap = 50,
        .final_soft_cap = 30,
        .rope_base_full = 1e4,
        .rope_base_sliding = 1e4,
        .end_of_turn = 107,
    },
    {
        .architecture = "gemma3",
        .pattern = kGemma3Pattern,
        .vocab_size = 262144,
        .qk_norm = true,
        .post_norms = true,
        .full_without_window = true,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .end_of_turn = 106,
    },
    {
        .architecture = "gemma3n",
        .pattern = kGemma3nPattern,
        .vocab_size = 262400,
        .sliding_window = 512,
        .qk_norm = true,
        .post_norms = true,
        .value_norm = true,
        .ple_vocab = 262144,
        .altup_inputs = 4,
        .altup_correct_scale = true,
        .laurel_rank = 64,
        .own_layers = 20,
        .ple_dim = 256,
        .sparse_layers = 10,
        .sparsity_cutoff = kCutoffOf95Percent,
        .query_scale = 1,
        .final_soft_cap = 30,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .end_of_turn = 106,
    },
    {
        .architecture = "gemma4",
        .pattern = kGemma3Pattern,
        .vocab_size = 262144,
        .qk_norm = true,
        .post_norms = true,
        .value_norm = true,
        .keys_may_be_values = true,
        .layer_scales = true,
        .may_have_experts = true,
        .full_head_dim = 512,
        .states_pattern = true,
        .query_scale = 1,
        .final_soft_cap = 30,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .full_turning = 4,
        .end_of_turn = 106,
        .end_of_call = 50,
    },
    {
        // Gemma 4's drafters, with layers of Gemma 4 without keys and values.
        .architecture = "gemma4-assistant",
        .pattern = kDrafterPattern,
        .vocab_size = 262144,
        .qk_norm = true,
        .post_norms = true,
        .layer_scales = true,
        .full_head_dim = 512,
        .query_scale = 1,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .full_turning = 4,
        .drafts = true,
        .end_of_turn = 106,
        .end_of_call = 50,
    },
    // Gemma 2 without the norms after attention and feed-forward.
    {
        .architecture = "vaultgemma",
        .pattern = kGemma2Pattern,
        .sliding_window = 4096,
        .attn_soft_cap = 50,
        .final_soft_cap = 30,
        .rope_base_full = 1e4,
        .rope_base_sliding = 1e4,
    },
    {
        // EmbeddingGemma (arXiv 2509.20354).
        .architecture = "gemma-embedding",
        .pattern = kGemma3Pattern,
        .vocab_size = 262144,
        .qk_norm = true,
        .post_norms = true,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .bidirectional = true,
        .dense_factor = 4,
    },
    {
        // The part of EmbeddingGemma 2 for text, with layers of Gemma 4.
        .architecture = "embeddinggemma2",
        .pattern = kGemma3Pattern,
        .vocab_size = 262144,
        .sliding_window = 513,  // |distance| <= 512, as its files write it
        .qk_norm = true,
        .post_norms = true,
        .value_norm = true,
        .layer_scales = true,
        .ple_projected = true,
        .query_scale = 1,
        .rope_base_full = 1e6,
        .rope_base_sliding = 1e4,
        .bidirectional = true,
        .embedding_dim = 768,
    },
    {
        .architecture = "recurrentgemma",
        .pattern = kRecurrentPattern,
        .sliding_window = 2048,
        .biases = true,
        .final_soft_cap = 30,
        .rope_base_sliding = 1e4,
        .rope_share = 2,
        .bf16_embedding_scale = true,
    },
};

bool HasKind(const Family& family, LayerKind kind) {
  return std::find(family.pattern.begin(), family.pattern.end(), kind) !=
         family.pattern.end();
}

}  // namespace

bool HasSlidingLayers(const Family& family) {
  return HasKind(family, LayerKind::kSliding);
}

bool HasRecurrentLayers(const Family& family) {
  return HasKind(family, LayerKind::kRecurrent);
}

std::span<const Family> Families() { return kFamilies; }

const Family* FindFamily(std::string_view architecture) {
  for (const Family& family : kFamilies) {
    if (family.architecture == architecture) return &family;
  }
  return nullptr;
}

const Family& FamilyOf(std::string_view architecture) {
  if (const Family* family = FindFamily(architecture)) return *family;
  std::string known;
  for (const Family& family : kFamilies) {
    known += StrCat(known.empty() ? "'" : ", '", family.architecture, "'");
  }
  throw InvalidArgument(StrCat("model config: architecture is '", architecture,
                               "', expected one of ", known));
}

void ApplyFamily(std::string_view architecture, ModelConfig& config) {
  ApplyFamily(FamilyOf(architecture), config);
}

void RepeatKinds(std::span<const LayerKind> pattern, ModelConfig& config) {
  for (size_t i = 0; i < config.num_layers(); ++i) {
    config.layers[i].kind = pattern[i % pattern.size()];
  }
}

void RepeatKinds(size_t period, ModelConfig& config) {
  for (size_t i = 0; i < config.num_layers(); ++i) {
    config.layers[i].kind =
        i % period < period - 1 ? LayerKind::kSliding : LayerKind::kFull;
  }
}

bool ShareKeysValues(size_t count, ModelConfig& config) {
  const size_t layers = config.num_layers();
  const size_t first = count < layers ? layers - count : 0;
  for (size_t i = first; i < layers && count != 0; ++i) {
    size_t owner = first;
    while (owner > 0 &&
           config.layers[owner - 1].kind != config.layers[i].kind) {
      --owner;
    }
    if (owner == 0) return false;
    config.layers[i].shares_kv = owner - 1;
  }
  return true;
}

void ApplyFamily(const Family& family, ModelConfig& config) {
  config.architecture = family.architecture;
  for (const Field& field : Fields()) {
    if (field.family == nullptr) continue;
    field.at.set(config, 0, field.family(family));
  }
  config.embedding_scale = DefaultEmbeddingScale(config.hidden_size);
  if (family.bf16_embedding_scale) {
    config.embedding_scale =
        Float32FromBFloat16(BFloat16FromFloat32(config.embedding_scale));
  }
  if (config.num_layers() > family.sparse_layers) {
    for (size_t i = 0; i < family.sparse_layers; ++i) {
      config.layers[i].sparsity_cutoff = family.sparsity_cutoff;
    }
  }
  if (family.query_scale != 0) config.query_scale = family.query_scale;
  config.eos_ids = {1};
  for (const int32_t id : {family.end_of_call, family.end_of_turn}) {
    if (id != 0) config.eos_ids.push_back(id);
  }
  RepeatKinds(family.pattern, config);
  ApplyFamilyToLayers(family, config);
}

void ApplyFamilyToLayers(const Family& family, ModelConfig& config) {
  for (LayerConfig& layer : config.layers) {
    const bool slides = layer.kind == LayerKind::kSliding;
    layer.window = slides ? family.sliding_window : 0;
    layer.rope_dim = layer.head_dim / family.rope_share;
    const size_t pairs = layer.rope_dim / 2;
    layer.still_pairs = slides ? 0 : pairs - pairs / family.full_turning;
    layer.rope_base =
        slides ? family.rope_base_sliding : family.rope_base_full;
  }
}

}  // namespace gkv
