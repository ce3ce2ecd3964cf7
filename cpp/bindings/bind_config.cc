#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "model/config.h"
#include "model/family.h"

namespace gkv {
namespace {

constexpr size_t kDefaultBlockTokens = 64;

constexpr std::pair<const char*, LayerKind> kKindNames[] = {
    {"full", LayerKind::kFull},
    {"sliding", LayerKind::kSliding},
    {"recurrent", LayerKind::kRecurrent},
};

std::vector<LayerKind> KindsFromNames(const std::vector<std::string>& names) {
  std::vector<LayerKind> kinds;
  for (const std::string& name : names) {
    const auto* found =
        std::find_if(std::begin(kKindNames), std::end(kKindNames),
                     [&](const auto& entry) { return entry.first == name; });
    if (found == std::end(kKindNames)) {
      throw InvalidArgument(StrCat("layer_kinds holds '", name,
                                   "', expected 'full', 'sliding' or "
                                   "'recurrent'"));
    }
    kinds.push_back(found->second);
  }
  return kinds;
}

std::vector<std::string> NamesOf(const std::vector<LayerKind>& kinds) {
  std::vector<std::string> names;
  for (const LayerKind kind : kinds) {
    names.push_back(kKindNames[static_cast<size_t>(kind)].first);
  }
  return names;
}

ModelConfig MakeConfig(
    std::string name, std::string architecture, size_t hidden_size,
    size_t num_layers, size_t num_heads, size_t kv_heads, size_t head_dim,
    size_t ffn_dim, size_t vocab_size, size_t context_length,
    size_t sliding_window, const std::vector<std::string>& layer_kinds,
    float rms_epsilon, double query_scale, float attn_soft_cap,
    float final_soft_cap, double rope_base_full, double rope_base_sliding,
    double rope_factor_full, bool qk_norm, bool post_norms,
    std::vector<int32_t> eos_ids, int32_t bos_id,
    std::optional<float> embedding_scale, std::optional<size_t> rope_dim,
    bool biases, size_t lru_width, size_t lru_blocks, size_t conv_width) {
  ModelConfig config;
  config.name = std::move(name);
  config.architecture = std::move(architecture);
  config.hidden_size = hidden_size;
  config.num_layers = num_layers;
  config.num_heads = num_heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.ffn_dim = ffn_dim;
  config.vocab_size = vocab_size;
  config.context_length = context_length;
  config.sliding_window = sliding_window;
  config.layer_kinds = KindsFromNames(layer_kinds);
  config.rms_epsilon = rms_epsilon;
  config.query_scale = query_scale;
  config.attn_soft_cap = attn_soft_cap;
  config.final_soft_cap = final_soft_cap;
  config.rope_base_full = rope_base_full;
  config.rope_base_sliding = rope_base_sliding;
  config.rope_factor_full = rope_factor_full;
  config.qk_norm = qk_norm;
  config.post_norms = post_norms;
  config.eos_ids = std::move(eos_ids);
  config.bos_id = bos_id;
  config.embedding_scale =
      embedding_scale.value_or(DefaultEmbeddingScale(hidden_size));
  config.rope_dim = rope_dim.value_or(head_dim);
  config.biases = biases;
  config.lru_width = lru_width;
  config.lru_blocks = lru_blocks;
  config.conv_width = conv_width;
  config.Validate();
  if (!config.name.empty() &&
      !config.SameShape(ConfigOf(ModelTypeFromName(config.name)))) {
    throw InvalidArgument(StrCat("name is '", config.name,
                                 "', whose shape is another; expected an "
                                 "empty name for a custom shape"));
  }
  return config;
}

}  // namespace

void RegisterConfig(py::module_& module) {
  py::class_<ModelConfig>(module, "ModelConfig", "Shape of a model. Immutable.")
      .def(py::init(&MakeConfig), py::kw_only(), py::arg("name") = "",
           py::arg("architecture"), py::arg("hidden_size"),
           py::arg("num_layers"), py::arg("num_heads"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("ffn_dim"), py::arg("vocab_size"),
           py::arg("context_length"), py::arg("sliding_window") = 0,
           py::arg("layer_kinds"), py::arg("rms_epsilon") = 1e-6f,
           py::arg("query_scale"), py::arg("attn_soft_cap") = 0.0f,
           py::arg("final_soft_cap") = 0.0f,
           py::arg("rope_base_full") = 10000.0,
           py::arg("rope_base_sliding") = 10000.0,
           py::arg("rope_factor_full") = 1.0, py::arg("qk_norm"),
           py::arg("post_norms"), py::arg("eos_ids") = std::vector<int32_t>{1},
           py::arg("bos_id") = 2, py::arg("embedding_scale") = py::none(),
           py::arg("rope_dim") = py::none(), py::arg("biases") = false,
           py::arg("lru_width") = 0, py::arg("lru_blocks") = 0,
           py::arg("conv_width") = 0)
      .def_static(
          "from_name",
          [](const std::string& name) {
            return ConfigOf(ModelTypeFromName(name));
          },
          py::arg("name"), "The published shape of a named type.")
      .def_static(
          "from_gguf",
          [](const std::filesystem::path& path) {
            return ConfigFromGguf(GgufFile(path.native()));
          },
          py::arg("path"), "The shape that a GGUF file's metadata states.")
      .def_static(
          "from_family",
          [](const std::string& architecture, size_t hidden_size,
             size_t num_layers, size_t num_heads, size_t kv_heads,
             size_t head_dim, size_t ffn_dim) {
            const Family* family = FindFamily(architecture);
            if (family == nullptr) {
              throw InvalidArgument(
                  StrCat("architecture '", architecture, "' is not known"));
            }
            ModelConfig config;
            config.hidden_size = hidden_size;
            config.num_layers = num_layers;
            config.num_heads = num_heads;
            config.kv_heads = kv_heads;
            config.head_dim = head_dim;
            config.ffn_dim = ffn_dim;
            ApplyFamily(*family, config);
            return config;
          },
          py::arg("architecture"), py::kw_only(), py::arg("hidden_size"),
          py::arg("num_layers"), py::arg("num_heads"), py::arg("kv_heads"),
          py::arg("head_dim"), py::arg("ffn_dim"),
          "What models of a family have in common, at these sizes. Not "
          "checked, "
          "and not complete: a beginning for readers of model files.")
      .def(
          "named",
          [](ModelConfig config) {
            NameByShape(config);
            return config;
          },
          "The same with the name of the type that has this shape, if any.")
      .def_readonly("name", &ModelConfig::name)
      .def_readonly("architecture", &ModelConfig::architecture)
      .def_readonly("hidden_size", &ModelConfig::hidden_size)
      .def_readonly("num_layers", &ModelConfig::num_layers)
      .def_readonly("num_heads", &ModelConfig::num_heads)
      .def_readonly("kv_heads", &ModelConfig::kv_heads)
      .def_readonly("head_dim", &ModelConfig::head_dim)
      .def_readonly("ffn_dim", &ModelConfig::ffn_dim)
      .def_readonly("vocab_size", &ModelConfig::vocab_size)
      .def_readonly("context_length", &ModelConfig::context_length)
      .def_readonly("sliding_window", &ModelConfig::sliding_window)
      .def_property_readonly(
          "layer_kinds",
          [](const ModelConfig& c) { return NamesOf(c.layer_kinds); })
      .def_readonly("rms_epsilon", &ModelConfig::rms_epsilon)
      .def_readonly("query_scale", &ModelConfig::query_scale)
      .def_readonly("attn_soft_cap", &ModelConfig::attn_soft_cap)
      .def_readonly("final_soft_cap", &ModelConfig::final_soft_cap)
      .def_readonly("rope_base_full", &ModelConfig::rope_base_full)
      .def_readonly("rope_base_sliding", &ModelConfig::rope_base_sliding)
      .def_readonly("rope_factor_full", &ModelConfig::rope_factor_full)
      .def_readonly("qk_norm", &ModelConfig::qk_norm)
      .def_readonly("post_norms", &ModelConfig::post_norms)
      .def_readonly("eos_ids", &ModelConfig::eos_ids)
      .def_readonly("bos_id", &ModelConfig::bos_id)
      .def_readonly("embedding_scale", &ModelConfig::embedding_scale)
      .def_readonly("rope_dim", &ModelConfig::rope_dim)
      .def_readonly("biases", &ModelConfig::biases)
      .def_readonly("lru_width", &ModelConfig::lru_width)
      .def_readonly("lru_blocks", &ModelConfig::lru_blocks)
      .def_readonly("conv_width", &ModelConfig::conv_width)
      .def_property_readonly(
          "state_bytes",
          [](const ModelConfig& config) {
            return config.MakeKvLayout(KvDtype::kF32, kDefaultBlockTokens)
                ->state_bytes();
          },
          "Bytes of the states of the recurrent layers of a conversation; 0 "
          "without such layers.")
      .def(
          "kv_bytes_per_token",
          [](const ModelConfig& config, const std::string& dtype) {
            const auto layout =
                config.MakeKvLayout(DtypeFromName(dtype), kDefaultBlockTokens);
            return std::pair(layout->bytes_per_token(LayerKind::kFull),
                             layout->bytes_per_token(LayerKind::kSliding));
          },
          py::arg("dtype") = "bf16",
          "Bytes that a token takes in full-attention layers and, while it is "
          "in the window, in sliding layers.")
      .def(
          "kv_bytes_at",
          [](const ModelConfig& config, size_t tokens,
             const std::string& dtype) {
            return config
                .MakeKvLayout(DtypeFromName(dtype), kDefaultBlockTokens)
                ->bytes_at(tokens);
          },
          py::arg("tokens"), py::arg("dtype") = "bf16",
          "KV bytes of a conversation of so many tokens.");

  module.def(
      "model_type_names",
      [] {
        std::vector<std::string> names;
        for (const ModelConfig& config : NamedConfigs()) {
          names.push_back(config.name);
        }
        return names;
      },
      "Names of all model types.");
}

}  // namespace gkv
