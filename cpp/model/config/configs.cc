// Configurations of the named models, from the rows of named_models.inc.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "base/error.h"
#include "base/fp_environment.h"
#include "gemmakv/config.h"
#include "model/config/family.h"
#include "model/config/fields.h"

namespace gkv {
namespace {

// A row of named_models.inc. Members that it leaves out are as its family has
// them, or as the others say.
struct NamedModel {
  const char* name;
  const char* family;
  size_t hidden, layers;
  size_t heads, kv_heads, head_dim, ffn;  // of each layer
  size_t context;
  double query_divisor = 0;  // scales queries by 1 / sqrt of it; 0: head_dim
  size_t window = 0;         // of layers that slide
  // For full layers: what positions are divided by, and sizes of their own.
  double rope_factor = 1;
  size_t full_kv_heads = 0, full_head_dim = 0;
  bool keys_are_values = false;
  // The number of last layers that share keys and values, and a width of their
  // own.
  size_t shared = 0, shared_ffn = 0;
  size_t ple_dim = 0;
  size_t period = 0;  // the last of every `period` layers is full
  size_t experts = 0, experts_used = 0, expert_ffn = 0;
};

using enum ModelType;
constexpr size_t k2K = 2048, k8K = 8192, k32K = 32768, k128K = 131072,
                 k256K = 262144;

// In the order of the enumerators.
constexpr NamedModel kNamedModels[] = {
#define GKV_MODEL(enumerator, ...) {__VA_ARGS__},
#include "gemmakv/named_models.inc"
#undef GKV_MODEL
};

// Models that share the shape of another one.
constexpr struct {
  const char* name;
  ModelType type;
} kOtherNames[] = {
    {"codegemma-2b", kGemma_2B},
    {"codegemma-7b", kGemma_7B},
};

ModelConfig MakeConfig(const NamedModel& row) {
  const ScopedFpEnvironment fp_environment;
  const Family& family = *FindFamily(row.family);
  ModelConfig config;
  config.name = row.name;
  config.hidden_size = row.hidden;
  config.layers.assign(row.layers, {.num_heads = row.heads,
                                    .kv_heads = row.kv_heads,
                                    .head_dim = row.head_dim,
                                    .ffn_dim = row.ffn});
  ApplyFamily(family, config);
  if (row.period != 0) RepeatKinds(row.period, config);
  ShareKeysValues(row.shared, config);
  for (LayerConfig& layer : config.layers) {
    if (layer.shares_kv && row.shared_ffn != 0) layer.ffn_dim = row.shared_ffn;
    if (layer.kind != LayerKind::kFull) continue;
    if (row.full_kv_heads != 0) layer.kv_heads = row.full_kv_heads;
    if (row.full_head_dim != 0) layer.head_dim = row.full_head_dim;
  }
  ApplyFamilyToLayers(family, config);
  config.keys_are_values = row.keys_are_values;
  config.ple_dim = row.ple_dim;
  if (row.ple_dim != 0 && !family.ple_projected) {
    config.ple_vocab =
        family.ple_vocab != 0 ? family.ple_vocab : config.vocab_size;
  }
  config.num_experts = row.experts;
  config.experts_used = row.experts_used;
  config.expert_ffn_dim = row.expert_ffn;
  config.context_length = row.context;
  if (family.query_scale == 0) {
    config.query_scale =
        1.0 / std::sqrt(row.query_divisor != 0
                            ? row.query_divisor
                            : static_cast<double>(row.head_dim));
  }
  for (LayerConfig& layer : config.layers) {
    if (layer.kind == LayerKind::kFull) layer.rope_factor = row.rope_factor;
    if (layer.kind == LayerKind::kSliding && row.window != 0) {
      layer.window = row.window;
    }
  }
  config.dense_dim = family.dense_factor * row.hidden;
  config.embedding_dim = family.embedding_dim;
  if (HasRecurrentLayers(family)) {
    // All published sizes are as wide as the residual stream and have a block
    // for each head.
    config.lru_width = row.hidden;
    config.lru_blocks = row.heads;
    config.conv_width = 4;
  }
  return config;
}

// The names that the bindings have for the kinds.
constexpr const char* kKindNames[] = {"full", "sliding", "recurrent"};

std::string AsText(double value) {
  std::ostringstream text;
  text.precision(9);
  text << value;
  return text.str();
}

}  // namespace

std::span<const ModelConfig> NamedConfigs() {
  static const std::vector<ModelConfig>* const configs = [] {
    auto* list = new std::vector<ModelConfig>;
    for (const NamedModel& row : kNamedModels) {
      list->push_back(MakeConfig(row));
    }
    return list;
  }();
  return *configs;
}

const ModelConfig& ConfigOf(ModelType type) {
  return NamedConfigs()[static_cast<size_t>(type)];
}

ModelType ModelTypeFromName(std::string_view name) {
  for (const auto& other : kOtherNames) {
    if (other.name == name) return other.type;
  }
  std::string known;
  const std::span<const ModelConfig> configs = NamedConfigs();
  for (size_t i = 0; i < configs.size(); ++i) {
    if (configs[i].name == name) return static_cast<ModelType>(i);
    known += (i == 0 ? "" : ", ") + configs[i].name;
  }
  throw InvalidArgument(
      StrCat("unknown model type '", name, "': expected one of ", known));
}

const ModelConfig* FindNamedLike(const ModelConfig& config) {
  const auto heads = [](const ModelConfig& c) {
    return FieldNamed("num_heads").Get(c);
  };
  for (const ModelConfig& named : NamedConfigs()) {
    if (named.architecture == config.architecture &&
        named.hidden_size == config.hidden_size &&
        named.num_layers() == config.num_layers() &&
        heads(named) == heads(config)) {
      return &named;
    }
  }
  return nullptr;
}

std::vector<FieldDifference> CompareWithNamed(const ModelConfig& config) {
  std::vector<FieldDifference> found;
  const ModelConfig* const named = FindNamedLike(config);
  if (named == nullptr) return found;
  for (size_t i = 0; i < config.num_layers(); ++i) {
    const LayerKind kind = config.layers[i].kind;
    const LayerKind expected = named->layers[i].kind;
    if (kind == expected) continue;
    found.push_back({"layer_kinds", i, kKindNames[static_cast<size_t>(kind)],
                     kKindNames[static_cast<size_t>(expected)]});
    break;
  }
  for (const Field& field : Fields()) {
    const std::string_view name = field.name;
    const std::vector<double> values = field.Get(config);
    const std::vector<double> expected = field.Get(*named);
    const bool stated = values[0] != 0;
    if (values == expected || name == "vocab_size" ||
        (name == "ple_vocab" && stated && expected[0] != 0) ||
        (name == "dense_dim" && !stated)) {
      continue;
    }
    const bool by_layer = values.size() > 1 || expected.size() > 1;
    for (size_t i = 0; i < config.num_layers(); ++i) {
      // Rotations of a kind of layers that the model does not have say nothing.
      const bool reads = field.IsReadIn(config.layers[i]);
      const bool differs =
          by_layer ? reads && field.IsReadIn(named->layers[i]) &&
                         NumberAt(values, i) != NumberAt(expected, i)
                   : reads || field.at.type != Field::Type::kReal;
      if (!differs) continue;
      found.push_back(
          {field.name, by_layer ? std::optional<size_t>(i) : std::nullopt,
           AsText(NumberAt(values, i)), AsText(NumberAt(expected, i))});
      break;
    }
  }
  return found;
}

void NameByShape(ModelConfig& config) {
  for (const ModelConfig& named : NamedConfigs()) {
    if (config.SameShape(named)) config.name = named.name;
  }
}

}  // namespace gkv
