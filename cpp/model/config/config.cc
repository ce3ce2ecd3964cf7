#include "gemmakv/config.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/hash.h"
#include "cache/kv_layout.h"
#include "model/config/family.h"
#include "model/config/fields.h"
#include "ops/altup.h"
#include "ops/attention.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

// What the ranges of fields alone do not say.
void CheckLayer(const ModelConfig& config, size_t i) {
  const LayerConfig& layer = config.layers[i];
  const auto check = [&](bool good, const char* name, size_t value,
                         const auto&... expected) {
    if (good) return;
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 " in layer ", i, ", expected ", expected...));
  };
  check(layer.num_heads % layer.kv_heads == 0, "num_heads", layer.num_heads,
        "a multiple of kv_heads ", layer.kv_heads);
  check(layer.num_heads / layer.kv_heads <= kMaxTileQueries, "num_heads",
        layer.num_heads, "at most ", kMaxTileQueries, " for each of kv_heads ",
        layer.kv_heads);
  check(layer.head_dim % 32 == 0, "head_dim", layer.head_dim,
        "a multiple of 32");
  check(layer.rope_dim % 2 == 0 && layer.rope_dim <= layer.head_dim,
        "rope_dim", layer.rope_dim, "an even number up to ", layer.head_dim);
  check(layer.still_pairs <= layer.rope_dim / 2, "still_pairs",
        layer.still_pairs, "at most half of rope_dim ", layer.rope_dim);
  if (!layer.shares_kv) return;
  const size_t owner = *layer.shares_kv;
  const auto shape = [](const LayerConfig& l) {
    return std::tuple(l.kind, l.window, l.kv_heads, l.head_dim, l.rope_dim,
                      l.still_pairs, l.rope_base, l.rope_factor);
  };
  check(owner < i && !config.layers[owner].shares_kv &&
            shape(config.layers[owner]) == shape(layer),
        "shares_kv", owner, "an earlier layer of the same kind and shape that "
        "has keys and values of its own");
}

// Weights of an expert are whole groups of rows.
void CheckExperts(const ModelConfig& config) {
  const auto check = [&](bool good, const char* name, size_t value,
                         const auto&... expected) {
    if (good) return;
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected ", expected...));
  };
  const size_t count = config.num_experts, used = config.experts_used;
  const size_t width = config.expert_ffn_dim;
  if (count == 0) {
    check(used == 0, "experts_used", used, "0 without num_experts");
    check(width == 0, "expert_ffn_dim", width, "0 without num_experts");
    return;
  }
  check(FamilyOf(config.architecture).may_have_experts, "num_experts", count,
        "0 for a ", config.architecture, " model");
  check(used >= 1 && used <= count, "experts_used", used, "1..", count,
        ", the num_experts");
  check(width >= kRowGroup && width % kRowGroup == 0, "expert_ffn_dim", width,
        "a multiple of ", kRowGroup);
  check(config.hidden_size % kRowGroup == 0, "hidden_size", config.hidden_size,
        "a multiple of ", kRowGroup, " with num_experts ", count);
}

void CheckAltUp(const ModelConfig& config) {
  const size_t inputs = config.altup_inputs;
  const auto check = [&](bool good, const char* name, size_t value,
                         const auto&... expected) {
    if (good) return;
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected ", expected...));
  };
  check(inputs != 1, "altup_inputs", inputs, "0 or 2..", kMaxAltUpInputs);
  check(inputs == 0 || config.altup_active < inputs, "altup_active",
        config.altup_active, "less than altup_inputs ", inputs);
  check(inputs != 0 || config.altup_active == 0, "altup_active",
        config.altup_active, "0 without altup_inputs");
  check(!config.altup_correct_scale || (inputs != 0 && config.ple_dim != 0),
        "altup_correct_scale", 1, "0 without altup_inputs and ple_dim");
  check(inputs == 0 || !config.layer_scales, "layer_scales", 1,
        "0 with altup_inputs ", inputs);
}

// A drafter reads what another model stores, and its clusters are whole groups
// of rows.
void CheckDrafter(const ModelConfig& config) {
  const auto check = [&](bool good, const char* name, auto value,
                         const auto&... expected) {
    if (good) return;
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected ", expected...));
  };
  const bool drafts = FamilyOf(config.architecture).drafts;
  const size_t count = config.num_centroids, used = config.centroids_used;
  check((config.target_hidden != 0) == drafts, "target_hidden",
        config.target_hidden,
        drafts ? "the hidden_size of the model that it guesses for" : "0",
        drafts ? "" : StrCat(" for a ", config.architecture, " model"));
  check(drafts || count == 0, "num_centroids", count, "0 for a ",
        config.architecture, " model");
  if (count == 0) {
    check(used == 0, "centroids_used", used, "0 without num_centroids");
  } else {
    check(config.vocab_size % (count * kRowGroup) == 0, "num_centroids", count,
          "clusters of a multiple of ", kRowGroup, " tokens, of vocab_size ",
          config.vocab_size);
    check(used >= 1 && used <= count, "centroids_used", used, "1..", count,
          ", the num_centroids");
  }
  if (!drafts) return;
  for (size_t i = 0; i < config.num_layers(); ++i) {
    const LayerConfig& layer = config.layers[i];
    check(!layer.shares_kv, "shares_kv", layer.shares_kv.value_or(0),
          "none for a drafter, whose layers all read another model's");
    check(layer.kind != LayerKind::kRecurrent, "a recurrent layer", i,
          "none for a drafter");
  }
  check(!config.bidirectional, "bidirectional", 1, "0 for a drafter");
  check(config.ple_dim == 0, "ple_dim", config.ple_dim, "0 for a drafter");
  check(config.altup_inputs == 0, "altup_inputs", config.altup_inputs,
        "0 for a drafter");
  check(config.final_soft_cap == 0, "final_soft_cap",
        config.final_soft_cap, "0 for a drafter");
  check(config.laurel_rank == 0, "laurel_rank", config.laurel_rank,
        "0 for a drafter");
}

}  // namespace

float DefaultEmbeddingScale(size_t hidden_size) {
  const ScopedFpEnvironment fp_environment;
  return static_cast<float>(std::sqrt(static_cast<double>(hidden_size)));
}

void ModelConfig::Validate() const {
  const Family& family = FamilyOf(architecture);
  for (const Field& field : Fields()) {
    field.Check(*this, field.Get(*this), StrCat("model config: ", field.name));
  }
  for (size_t i = 0; i < num_layers(); ++i) CheckLayer(*this, i);
  const size_t ple_rows = family.ple_vocab != 0 ? 1 : vocab_size;
  const bool no_table = ple_dim == 0 || family.ple_projected;
  if (no_table ? ple_vocab != 0 : ple_vocab < ple_rows) {
    throw InvalidArgument(
        StrCat("model config: ple_vocab is ", ple_vocab, ", expected ",
               ple_dim == 0 ? std::string("0 without ple_dim")
               : no_table
                   ? StrCat("0 for a ", architecture, " model")
               : family.ple_vocab != 0
                   ? StrCat("at least 1 with ple_dim ", ple_dim)
                   : StrCat("at least vocab_size ", vocab_size,
                            " with ple_dim ", ple_dim)));
  }
  CheckExperts(*this);
  if (bidirectional &&
      std::any_of(layers.begin(), layers.end(), [](const LayerConfig& layer) {
        return layer.kind == LayerKind::kRecurrent || layer.shares_kv;
      })) {
    throw InvalidArgument(
        "model config: bidirectional is 1, expected 0 with recurrent layers "
        "or shares_kv");
  }
  if (dense_dim != 0 && !bidirectional) {
    throw InvalidArgument(StrCat("model config: dense_dim is ", dense_dim,
                                 ", expected 0 unless bidirectional"));
  }
  if (embedding_dim != 0 && (!bidirectional || dense_dim != 0)) {
    throw InvalidArgument(
        StrCat("model config: embedding_dim is ", embedding_dim,
               ", expected 0 unless bidirectional and without dense_dim"));
  }
  CheckAltUp(*this);
  CheckDrafter(*this);
  // Weights of a block are whole groups of rows.
  if (HasLayers(LayerKind::kRecurrent) &&
      lru_width % (lru_blocks * kRowGroup) != 0) {
    throw InvalidArgument(StrCat("model config: lru_width is ", lru_width,
                                 ", expected ", lru_blocks,
                                 " blocks of a multiple of ", kRowGroup));
  }
  for (const int32_t id : eos_ids) {
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("model config: eos id ", id,
                                   ", expected 0..", vocab_size - 1));
    }
  }
}

bool ModelConfig::HasLayers(LayerKind kind) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const LayerConfig& l) { return l.kind == kind; });
}

std::shared_ptr<const KvLayout> ModelConfig::MakeKvLayout(
    KvDtype dtype, size_t block_tokens) const {
  std::vector<KvLayerSpec> specs;
  for (const LayerConfig& layer : layers) {
    KvLayerSpec spec{.kind = layer.kind};
    if (layer.kind == LayerKind::kRecurrent) {
      spec.lru_width = lru_width;
      spec.conv_tail = conv_width - 1;
    } else {
      spec.kv_heads = layer.kv_heads;
      spec.head_dim = layer.head_dim;
      spec.window = layer.kind == LayerKind::kSliding ? layer.window : 0;
      spec.shares = layer.shares_kv;
    }
    specs.push_back(spec);
  }
  return std::make_shared<KvLayout>(std::move(specs), dtype, block_tokens);
}

// First the fields that every model has: sizes, kinds of layers, then the
// rest. What is younger, and what layers differ in, counts where it is there,
// behind its mark or its name: it cannot be taken for anything else.
Hash128 ModelConfig::Hash() const {
  Hasher hasher;
  hasher.Update(AsBytes(architecture));
  for (const Field& field : Fields()) {
    if (field.mark != Field::kAlways || field.at.type != Field::Type::kSize) {
      continue;
    }
    hasher.UpdateValue(static_cast<uint64_t>(field.Get(*this)[0]));
  }
  for (const LayerConfig& layer : layers) {
    hasher.UpdateValue(static_cast<uint32_t>(layer.kind));
  }
  for (const Field& field : Fields()) {
    if (field.mark == Field::kAlways && field.at.type != Field::Type::kSize) {
      hasher.UpdateValue(field.Get(*this)[0]);
    }
  }
  uint32_t mark = 0;
  for (const Field& field : Fields()) {
    const std::vector<double> values = field.Get(*this);
    const bool differ = values.size() > 1;
    if (field.mark == Field::kNever ||
        (field.mark == Field::kAlways ? !differ
                                      : values == field.Default(*this))) {
      continue;
    }
    if (differ) hasher.Update(AsBytes(std::string_view(field.name)));
    if (field.mark != mark) hasher.UpdateValue(mark = field.mark);
    if (field.at.type == Field::Type::kFlag) continue;
    for (const double value : values) hasher.UpdateValue(value);
  }
  return hasher.Finish();
}

bool ModelConfig::SameShape(const ModelConfig& other) const {
  ModelConfig padded = *this;
  padded.vocab_size = other.vocab_size;
  if (ple_vocab != 0) padded.ple_vocab = other.ple_vocab;
  return padded.Hash() == other.Hash() &&
         context_length == other.context_length;
}

}  // namespace gkv
