// The table of named models. A new size of a known family is one row.
//
// Shapes: the configurations that Google published with the checkpoints
// (config.json on the model pages; Gemma 3 technical report, table 1).

#include <cmath>

#include "base/error.h"
#include "model/config.h"

namespace gkv {
namespace {

struct Gemma3Row {
  const char* name;
  size_t hidden, layers, heads, kv_heads, ffn, window, context;
  double query_divisor;  // queries are scaled by 1 / sqrt(query_divisor)
  size_t head_dim;
  double rope_factor;
};

constexpr Gemma3Row kGemma3Rows[] = {
    {"gemma3-270m", 640, 18, 4, 1, 2048, 512, 32768, 256, 256, 1},
    {"gemma3-1b", 1152, 26, 4, 1, 6912, 512, 32768, 256, 256, 1},
    {"gemma3-4b", 2560, 34, 8, 4, 10240, 1024, 131072, 256, 256, 8},
    {"gemma3-12b", 3840, 48, 16, 8, 15360, 1024, 131072, 256, 256, 8},
    {"gemma3-27b", 5376, 62, 32, 16, 21504, 1024, 131072, 168, 128, 8},
};

ModelConfig FromRow(const Gemma3Row& row) {
  ModelConfig config;
  config.name = row.name;
  config.architecture = "gemma3";
  config.hidden_size = row.hidden;
  config.num_layers = row.layers;
  config.num_heads = row.heads;
  config.kv_heads = row.kv_heads;
  config.head_dim = row.head_dim;
  config.ffn_dim = row.ffn;
  config.vocab_size = 262144;
  config.context_length = row.context;
  config.sliding_window = row.window;
  config.layer_kinds = PeriodicLayerKinds(row.layers, 6);
  config.query_scale = 1.0 / std::sqrt(row.query_divisor);
  config.rope_base_full = 1e6;
  config.rope_base_sliding = 1e4;
  config.rope_factor_full = row.rope_factor;
  config.qk_norm = true;
  config.post_norms = true;
  config.eos_ids = {1, 106};
  return config;
}

}  // namespace

std::vector<LayerKind> PeriodicLayerKinds(size_t num_layers, size_t period) {
  std::vector<LayerKind> kinds(num_layers);
  for (size_t i = 0; i < num_layers; ++i) {
    kinds[i] = i % period < period - 1 ? LayerKind::kSliding : LayerKind::kFull;
  }
  return kinds;
}

std::span<const ModelConfig> NamedConfigs() {
  static const std::vector<ModelConfig>* const configs = [] {
    auto* rows = new std::vector<ModelConfig>;
    for (const Gemma3Row& row : kGemma3Rows) rows->push_back(FromRow(row));
    return rows;
  }();
  return *configs;
}

const ModelConfig& ConfigOf(ModelType type) {
  return NamedConfigs()[static_cast<size_t>(type)];
}

ModelType ModelTypeFromName(std::string_view name) {
  std::string known;
  const std::span<const ModelConfig> configs = NamedConfigs();
  for (size_t i = 0; i < configs.size(); ++i) {
    if (configs[i].name == name) return static_cast<ModelType>(i);
    known += (i == 0 ? "" : ", ") + configs[i].name;
  }
  throw InvalidArgument(
      StrCat("unknown model type '", name, "': expected one of ", known));
}

}  // namespace gkv
