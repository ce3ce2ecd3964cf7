// The table of named models. A new size of a known family is one row, and one
// golden in tests/golden/configs/.
//
// Shapes: the configurations that Google published with the checkpoints
// (config.json on the model pages).

#include <cmath>
#include <iterator>

#include "base/error.h"
#include "model/config.h"
#include "model/family.h"

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
};

using enum ModelType;
constexpr size_t k8K = 8192, k32K = 32768, k128K = 131072;

// clang-format off
constexpr Row kRows[] = {
    // hidden, layers, heads, kv heads, head_dim, ffn, query divisor, context,
    // window, rope factor
    {kGemma_2B, "gemma-2b", "gemma",
     2048, 18, 8, 1, 256, 16384, 256, k8K},
    {kGemma_7B, "gemma-7b", "gemma",
     3072, 28, 16, 16, 256, 24576, 256, k8K},
    {kGemma2_2B, "gemma2-2b", "gemma2",
     2304, 26, 8, 4, 256, 9216, 256, k8K},
    {kGemma2_9B, "gemma2-9b", "gemma2",
     3584, 42, 16, 8, 256, 14336, 256, k8K},
    {kGemma2_27B, "gemma2-27b", "gemma2",
     4608, 46, 32, 16, 128, 36864, 144, k8K},
    {kGemma3_270M, "gemma3-270m", "gemma3",
     640, 18, 4, 1, 256, 2048, 256, k32K, 512},
    {kGemma3_1B, "gemma3-1b", "gemma3",
     1152, 26, 4, 1, 256, 6912, 256, k32K, 512},
    {kGemma3_4B, "gemma3-4b", "gemma3",
     2560, 34, 8, 4, 256, 10240, 256, k128K, 1024, 8},
    {kGemma3_12B, "gemma3-12b", "gemma3",
     3840, 48, 16, 8, 256, 15360, 256, k128K, 1024, 8},
    {kGemma3_27B, "gemma3-27b", "gemma3",
     5376, 62, 32, 16, 128, 21504, 168, k128K, 1024, 8},
    {kRecurrentGemma_2B, "recurrentgemma-2b", "recurrentgemma",
     2560, 26, 10, 1, 256, 7680, 256, k8K},
    {kRecurrentGemma_9B, "recurrentgemma-9b", "recurrentgemma",
     4096, 38, 16, 1, 256, 12288, 256, k8K},
};
// clang-format on

// Models that share the shape of another one.
constexpr struct {
  const char* name;
  ModelType type;
} kOtherNames[] = {
    {"codegemma-2b", kGemma_2B},
    {"codegemma-7b", kGemma_7B},
};

ModelConfig FromRow(const Row& row) {
  const Family& family = *FindFamily(row.family);
  ModelConfig config;
  config.name = row.name;
  config.hidden_size = row.hidden;
  config.num_layers = row.layers;
  config.num_heads = row.heads;
  config.kv_heads = row.kv_heads;
  config.head_dim = row.head_dim;
  config.ffn_dim = row.ffn;
  ApplyFamily(family, config);
  config.context_length = row.context;
  if (row.window != 0) config.sliding_window = row.window;
  config.query_scale = 1.0 / std::sqrt(row.query_divisor);
  config.rope_factor_full = row.rope_factor;
  if (HasRecurrentLayers(family)) {
    // All published sizes: as wide as the residual stream, a block per head.
    config.lru_width = row.hidden;
    config.lru_blocks = row.heads;
    config.conv_width = 4;
  }
  return config;
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

void NameByShape(ModelConfig& config) {
  for (const ModelConfig& named : NamedConfigs()) {
    if (config.SameShape(named)) config.name = named.name;
  }
}

}  // namespace gkv
