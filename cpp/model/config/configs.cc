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

struct Row {
  ModelType type;
  const char* name;
  const char* family;
  size_t hidden, layers, heads, kv_heads, head_dim, ffn;
  double query_divisor;  // queries are scaled by 1 / sqrt(query_divisor)
  size_t context;
  size_t window = 0;  // 0: the family's
  double rope_factor = 1;
  size_t full_kv_heads = 0, full_head_dim = 0;  // 0: as in sliding layers
  bool keys_are_values = false;
  size_t shared = 0;      // last layers that share keys and values
  size_t shared_ffn = 0;  // 0: as in the others
  size_t ple_dim = 0;
  size_t period = 0;  // layers to a full one; 0: the family's
  size_t experts = 0, experts_used = 0, expert_ffn = 0;
};

using enum ModelType;
constexpr size_t k2K = 2048, k8K = 8192, k32K = 32768, k128K = 131072,
                 k256K = 262144;

constexpr Row kRows[] = {
#define GKV_MODEL(type, name, family, ...) \
  {ModelType::type, name, family, __VA_ARGS__},
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

ModelConfig FromRow(const Row& row) {
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
  for (size_t i = 0; i < row.layers && row.period != 0; ++i) {
    config.layers[i].kind = i % row.period < row.period - 1
                                ? LayerKind::kSliding
                                : LayerKind::kFull;
  }
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
  config.query_scale = 1.0 / std::sqrt(row.query_divisor);
  for (LayerConfig& layer : config.layers) {
    if (layer.kind == LayerKind::kFull) layer.rope_factor = row.rope_factor;
    if (layer.kind == LayerKind::kSliding && row.window != 0) {
      layer.window = row.window;
    }
  }
  config.dense_dim = family.dense_factor * row.hidden;
  config.embedding_dim = family.embedding_dim;
  if (HasRecurrentLayers(family)) {
    // All published sizes: as wide as the residual stream, a block per head.
    config.lru_width = row.hidden;
    config.lru_blocks = row.heads;
    config.conv_width = 4;
  }
  return config;
}

// As the bindings call them.
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
    auto* list = new std::vector<ModelConfig>(std::size(kRows));
    for (const Row& row : kRows) {
      (*list)[static_cast<size_t>(row.type)] = FromRow(row);
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
    if (field.name == std::string_view("vocab_size")) continue;
    const std::vector<double> values = field.Get(config);
    const std::vector<double> expected = field.Get(*named);
    const auto add = [&](std::optional<size_t> layer, size_t i) {
      found.push_back({field.name, layer,
                       AsText(values[values.size() == 1 ? 0 : i]),
                       AsText(expected[expected.size() == 1 ? 0 : i])});
    };
    if (values == expected) continue;
    const bool unlike_zero = values[0] != 0 && expected[0] != 0;
    if (field.name == std::string_view("ple_vocab") && unlike_zero) continue;
    if (field.name == std::string_view("dense_dim") && values[0] == 0) continue;
    if (values.size() == 1 && expected.size() == 1) {
      // Rotations of a kind of layers that there is none of say nothing.
      const bool read = std::any_of(
          config.layers.begin(), config.layers.end(),
          [&](const LayerConfig& layer) { return field.IsReadIn(layer); });
      if (read || field.at.type != Field::Type::kReal) add(std::nullopt, 0);
      continue;
    }
    for (size_t i = 0; i < config.num_layers(); ++i) {
      if (!field.IsReadIn(config.layers[i]) ||
          !field.IsReadIn(named->layers[i]) ||
          values[values.size() == 1 ? 0 : i] ==
              expected[expected.size() == 1 ? 0 : i]) {
        continue;
      }
      add(i, i);
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
