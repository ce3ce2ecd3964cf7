#include "gemmakv/config.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>
#include <utility>

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

// Throws unless `holds`. The error names a field, its value and what it should
// be.
void Require(bool holds, std::string_view field, const auto& value,
             const auto&... expected) {
  if (holds) return;
  throw InvalidArgument(StrCat("model config: ", field, " is ", value,
                               ", expected ", expected...));
}

// Checks of a layer what the ranges of fields alone do not say.
void CheckLayer(const ModelConfig& config, size_t i) {
  const LayerConfig& layer = config.layers[i];
  const auto require = [&](bool holds, std::string_view field, size_t value,
                           const auto&... expected) {
    if (holds) return;
    Require(false, field, StrCat(value, " in layer ", i), expected...);
  };
  require(layer.num_heads % layer.kv_heads == 0, "num_heads", layer.num_heads,
          "a multiple of kv_heads ", layer.kv_heads);
  require(layer.num_heads / layer.kv_heads <= kMaxTileQueries, "num_heads",
          layer.num_heads, "at most ", kMaxTileQueries,
          " for each of kv_heads ", layer.kv_heads);
  require(layer.head_dim % 32 == 0, "head_dim", layer.head_dim,
          "a multiple of 32");
  require(layer.rope_dim % 2 == 0 && layer.rope_dim <= layer.head_dim,
          "rope_dim", layer.rope_dim, "an even number up to ", layer.head_dim);
  require(layer.still_pairs <= layer.rope_dim / 2, "still_pairs",
          layer.still_pairs, "at most half of rope_dim ", layer.rope_dim);
  if (!layer.shares_kv) return;
  const size_t owner = *layer.shares_kv;
  const auto shape = [](const LayerConfig& l) {
    return std::tuple(l.kind, l.window, l.kv_heads, l.head_dim, l.rope_dim,
                      l.still_pairs, l.rope_base, l.rope_factor);
  };
  require(owner < i && !config.layers[owner].shares_kv &&
              shape(config.layers[owner]) == shape(layer),
          "shares_kv", owner,
          "an earlier layer of the same kind and shape that has keys and "
          "values of its own");
}

void CheckPerLayerEmbedding(const ModelConfig& config, const Family& family) {
  const size_t dim = config.ple_dim, rows = config.ple_vocab;
  if (dim == 0) {
    Require(rows == 0, "ple_vocab", rows, "0 without ple_dim");
  } else if (family.ple_projected) {
    Require(rows == 0, "ple_vocab", rows, "0 for a ", config.architecture,
            " model");
  } else if (family.ple_vocab != 0) {
    Require(rows >= 1, "ple_vocab", rows, "at least 1 with ple_dim ", dim);
  } else {
    Require(rows >= config.vocab_size, "ple_vocab", rows,
            "at least vocab_size ", config.vocab_size, " with ple_dim ", dim);
  }
}

// Weights of an expert are whole groups of rows.
void CheckExperts(const ModelConfig& config, const Family& family) {
  const size_t count = config.num_experts, used = config.experts_used;
  const size_t width = config.expert_ffn_dim;
  if (count == 0) {
    Require(used == 0, "experts_used", used, "0 without num_experts");
    Require(width == 0, "expert_ffn_dim", width, "0 without num_experts");
    return;
  }
  Require(family.may_have_experts, "num_experts", count, "0 for a ",
          config.architecture, " model");
  Require(used >= 1 && used <= count, "experts_used", used, "1..", count,
          ", the num_experts");
  Require(width >= kRowGroup && width % kRowGroup == 0, "expert_ffn_dim", width,
          "a multiple of ", kRowGroup);
  Require(config.hidden_size % kRowGroup == 0, "hidden_size",
          config.hidden_size, "a multiple of ", kRowGroup, " with num_experts ",
          count);
}

void CheckEmbeddings(const ModelConfig& config) {
  Require(!config.bidirectional ||
              std::none_of(config.layers.begin(), config.layers.end(),
                           [](const LayerConfig& layer) {
                             return layer.kind == LayerKind::kRecurrent ||
                                    layer.shares_kv;
                           }),
          "bidirectional", 1, "0 with recurrent layers or shares_kv");
  Require(config.dense_dim == 0 || config.bidirectional, "dense_dim",
          config.dense_dim, "0 unless bidirectional");
  Require(config.embedding_dim == 0 ||
              (config.bidirectional && config.dense_dim == 0),
          "embedding_dim", config.embedding_dim,
          "0 unless bidirectional and without dense_dim");
}

void CheckAltUp(const ModelConfig& config) {
  const size_t inputs = config.altup_inputs, active = config.altup_active;
  Require(inputs != 1, "altup_inputs", inputs, "0 or 2..", kMaxAltUpInputs);
  Require(inputs == 0 || active < inputs, "altup_active", active,
          "less than altup_inputs ", inputs);
  Require(inputs != 0 || active == 0, "altup_active", active,
          "0 without altup_inputs");
  Require(!config.altup_correct_scale || (inputs != 0 && config.ple_dim != 0),
          "altup_correct_scale", 1, "0 without altup_inputs and ple_dim");
  Require(inputs == 0 || !config.layer_scales, "layer_scales", 1,
          "0 with altup_inputs ", inputs);
}

// A drafter reads what another model stores, and its clusters are whole groups
// of rows.
void CheckDrafter(const ModelConfig& config, const Family& family) {
  const size_t hidden = config.target_hidden;
  const size_t count = config.num_centroids, used = config.centroids_used;
  if (family.drafts) {
    Require(hidden != 0, "target_hidden", hidden,
            "the hidden_size of the model that it guesses for");
  } else {
    for (const auto& [field, value] : {std::pair("target_hidden", hidden),
                                       std::pair("num_centroids", count)}) {
      Require(value == 0, field, value, "0 for a ", config.architecture,
              " model");
    }
  }
  if (count == 0) {
    Require(used == 0, "centroids_used", used, "0 without num_centroids");
  } else {
    Require(config.vocab_size % (count * kRowGroup) == 0, "num_centroids",
            count, "clusters of a multiple of ", kRowGroup,
            " tokens, of vocab_size ", config.vocab_size);
    Require(used >= 1 && used <= count, "centroids_used", used, "1..", count,
            ", the num_centroids");
  }
  if (!family.drafts) return;
  for (size_t i = 0; i < config.num_layers(); ++i) {
    const LayerConfig& layer = config.layers[i];
    Require(!layer.shares_kv, "shares_kv", layer.shares_kv.value_or(0),
            "none for a drafter, whose layers all read another model's");
    Require(layer.kind != LayerKind::kRecurrent, "a recurrent layer", i,
            "none for a drafter");
  }
  const auto none = [](std::string_view field, auto value) {
    Require(value == 0, field, value, "0 for a drafter");
  };
  none("bidirectional", config.bidirectional);
  none("ple_dim", config.ple_dim);
  none("altup_inputs", config.altup_inputs);
  none("final_soft_cap", config.final_soft_cap);
  none("laurel_rank", config.laurel_rank);
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
  CheckPerLayerEmbedding(*this, family);
  CheckExperts(*this, family);
  CheckEmbeddings(*this);
  CheckAltUp(*this);
  CheckDrafter(*this, family);
  // Weights of a block are whole groups of rows.
  Require(!HasLayers(LayerKind::kRecurrent) ||
              lru_width % (lru_blocks * kRowGroup) == 0,
          "lru_width", lru_width, lru_blocks, " blocks of a multiple of ",
          kRowGroup);
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

// First come the fields that every model has: sizes, kinds of layers, then the
// rest. A younger field enters only where it is not the default, after its
// mark, and a field in which layers differ after its name. So neither can be
// taken for anything else.
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
