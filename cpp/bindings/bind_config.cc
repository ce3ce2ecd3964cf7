#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "model/config/config_gguf.h"
#include "model/config/family.h"
#include "model/config/fields.h"
#include "model/create_conversation.h"

namespace gkv {
namespace {

constexpr size_t kDefaultBlockTokens = 64;

void SetKinds(const std::vector<std::string>& names, ModelConfig& config) {
  if (names.size() != config.num_layers()) {
    throw InvalidArgument(StrCat("model config: layer_kinds has ", names.size(),
                                 " entries, expected ", config.num_layers()));
  }
  for (size_t i = 0; i < names.size(); ++i) {
    config.layers[i].kind =
        EnumFromName<LayerKind>(kKindNames, "one of layer_kinds", names[i]);
  }
}

std::vector<std::string> KindsOf(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const LayerConfig& layer : config.layers) {
    names.push_back(NameOf(layer.kind));
  }
  return names;
}

py::object ToPython(const Field& field, double number) {
  if (field.at.type == Field::Type::kFlag) return py::bool_(number != 0);
  if (field.at.type == Field::Type::kReal) {
    if (!std::isfinite(number)) return py::none();
    return py::float_(number);
  }
  if (number < 0) return py::none();
  return py::int_(static_cast<size_t>(number));
}

// Returns a number, or a list with one for each layer if layers differ.
py::object ToPython(const Field& field, const ModelConfig& config) {
  const std::vector<double> numbers = field.Get(config);
  if (numbers.size() == 1) return ToPython(field, numbers[0]);
  py::list list;
  for (const double number : numbers) list.append(ToPython(field, number));
  return list;
}

double FromPython(const Field& field, py::handle value) {
  const bool whole = field.at.type == Field::Type::kSize;
  try {
    if (value.is_none() && (whole || !std::isfinite(field.low))) {
      return whole ? -1 : field.low;
    }
    return whole ? static_cast<double>(value.cast<int64_t>())
                 : value.cast<double>();
  } catch (const py::cast_error&) {
    throw py::type_error(StrCat(field.name, ": expected a ",
                                whole ? "whole " : "", "number, found ",
                                py::repr(value).cast<std::string>()));
  }
}

// Sets a field from the keywords and takes it out of them.
void SetField(const Field& field, py::kwargs& kwargs, ModelConfig& config) {
  std::vector<double> numbers = field.Default(config);
  py::object given = kwargs.attr("pop")(field.name, py::none());
  if (numbers.empty() && given.is_none()) {
    throw py::type_error(
        StrCat("ModelConfig: missing keyword argument '", field.name, "'"));
  }
  if (!given.is_none()) {
    const bool one = !py::isinstance<py::list>(given) &&
                     !py::isinstance<py::tuple>(given);
    numbers.clear();
    for (const py::handle value : one ? py::make_tuple(given) : given) {
      numbers.push_back(FromPython(field, value));
    }
  }
  field.Check(config, numbers, StrCat("model config: ", field.name));
  field.Set(config, numbers);
}

ModelConfig MakeConfig(std::string name, std::string architecture,
                       const std::vector<std::string>& layer_kinds,
                       std::vector<int32_t> eos_ids, int32_t bos_id,
                       py::kwargs kwargs) {
  ModelConfig config;
  config.name = std::move(name);
  config.architecture = std::move(architecture);
  config.eos_ids = std::move(eos_ids);
  config.bos_id = bos_id;
  for (const Field& field : Fields()) {
    SetField(field, kwargs, config);
    if (field.name == std::string_view("num_layers")) {
      SetKinds(layer_kinds, config);
    }
  }
  for (const auto& [key, value] : kwargs) {
    throw py::type_error(StrCat("ModelConfig: unexpected keyword argument '",
                                py::str(key).cast<std::string>(), "'"));
  }
  config.Validate();
  if (!config.name.empty() &&
      !config.SameShape(ConfigOf(ModelTypeFromName(config.name)))) {
    throw InvalidArgument(StrCat("name is '", config.name,
                                 "', whose shape is another; expected an "
                                 "empty name for a custom shape"));
  }
  return config;
}

py::dict Arguments(const ModelConfig& config) {
  py::dict arguments;
  arguments["name"] = config.name;
  arguments["architecture"] = config.architecture;
  arguments["layer_kinds"] = KindsOf(config);
  for (const Field& field : Fields()) {
    arguments[field.name] = ToPython(field, config);
  }
  arguments["eos_ids"] = config.eos_ids;
  arguments["bos_id"] = config.bos_id;
  return arguments;
}

using DifferenceTuple =
    std::tuple<std::string, std::optional<size_t>, std::string, std::string>;

std::pair<std::string, std::vector<DifferenceTuple>> Differences(
    const ModelConfig& config) {
  std::vector<DifferenceTuple> found;
  for (const FieldDifference& one : CompareWithNamed(config)) {
    found.emplace_back(one.field, one.layer, one.found, one.expected);
  }
  const ModelConfig* const named = FindNamedLike(config);
  return {named == nullptr ? std::string() : named->name, std::move(found)};
}

// Returns the signature with all keywords, as Python writes it.
std::string Signature() {
  std::string text =
      "__init__(self, *, name='', architecture, layer_kinds, eos_ids=[1], "
      "bos_id=2";
  for (const Field& field : Fields()) {
    text += StrCat(", ", field.name);
    if (field.Default(ModelConfig()).empty()) continue;
    text += StrCat("=", py::repr(field.fallback
                                     ? ToPython(field, *field.fallback)
                                     : py::none())
                            .cast<std::string>());
  }
  return text + ")";
}

}  // namespace

void RegisterConfig(py::module_& module) {
  py::options options;
  options.disable_function_signatures();
  py::class_<ModelConfig> model_config(
      module, "ModelConfig",
      "The shape of a model. Immutable.\n\nFields in which layers may differ "
      "(heads, head_dim, ffn_dim, window, rotary\nembeddings, shared keys and "
      "values) take a number, or a list with an entry for\neach layer. The "
      "properties are lists if layers differ.");
  model_config.def(py::init(&MakeConfig), py::kw_only(), py::arg("name") = "",
                   py::arg("architecture"), py::arg("layer_kinds"),
                   py::arg("eos_ids") = std::vector<int32_t>{1},
                   py::arg("bos_id") = 2, Signature().c_str());
  for (const Field& field : Fields()) {
    model_config.def_property_readonly(
        field.name,
        [&field](const ModelConfig& c) { return ToPython(field, c); });
  }
  options.enable_function_signatures();
  model_config
      .def_static(
          "from_name",
          [](const std::string& name) {
            return ConfigOf(ModelTypeFromName(name));
          },
          py::arg("name"), "Returns the published shape of a named type.")
      .def_static(
          "from_gguf",
          [](const std::filesystem::path& path) {
            GgufFile file(path.native());
            return ConfigFromGguf(file);
          },
          py::arg("path"),
          "Returns the shape that a GGUF file's metadata state.")
      .def_static(
          "from_family",
          [](const std::string& architecture, size_t hidden_size,
             size_t num_layers, size_t num_heads, size_t kv_heads,
             size_t head_dim, size_t ffn_dim) {
            ModelConfig config;
            config.hidden_size = hidden_size;
            config.layers.assign(num_layers, {.num_heads = num_heads,
                                              .kv_heads = kv_heads,
                                              .head_dim = head_dim,
                                              .ffn_dim = ffn_dim});
            ApplyFamily(architecture, config);
            return config;
          },
          py::arg("architecture"), py::kw_only(), py::arg("hidden_size"),
          py::arg("num_layers"), py::arg("num_heads"), py::arg("kv_heads"),
          py::arg("head_dim"), py::arg("ffn_dim"),
          "Returns what models of a family have in common, at these sizes. It "
          "is neither checked nor complete: a beginning for readers of model "
          "files.")
      .def(
          "named",
          [](ModelConfig config) {
            NameByShape(config);
            return config;
          },
          "Returns the same shape with the name of the type that has it, if "
          "there is one.")
      .def_readonly("name", &ModelConfig::name)
      .def_readonly("architecture", &ModelConfig::architecture)
      .def_property_readonly("layer_kinds", &KindsOf)
      .def_readonly("eos_ids", &ModelConfig::eos_ids)
      .def_readonly("bos_id", &ModelConfig::bos_id)
      .def("__repr__",
           [](const ModelConfig& config) {
             std::string text;
             for (const auto& [key, value] : Arguments(config)) {
               text += StrCat(text.empty() ? "ModelConfig(" : ", ",
                              py::str(key).cast<std::string>(), "=",
                              py::repr(value).cast<std::string>());
             }
             return text + ")";
           })
      .def("arguments", &Arguments,
           "Returns keywords that make the same configuration.")
      .def_static(
          "json_keys",
          [] {
            std::vector<std::tuple<std::string, std::string, bool>> keys;
            for (const Field& field : Fields()) {
              if (field.json == nullptr) continue;
              keys.emplace_back(field.name, field.json,
                                field.at.type == Field::Type::kSize);
            }
            return keys;
          },
          "Returns (keyword, key in config.json, whether it is a size) of the "
          "fields that all families state alike.")
      .def_property_readonly(
          "state_bytes",
          [](const ModelConfig& config) {
            return config.MakeKvLayout(KvDtype::kF32, kDefaultBlockTokens)
                ->state_bytes();
          },
          "The bytes of the states of a conversation's recurrent layers; 0 "
          "without such layers.")
      .def(
          "kv_bytes_per_token",
          [](const ModelConfig& config, const std::string& dtype) {
            if (!HoldsConversations(config)) {
              return std::pair(size_t{0}, size_t{0});
            }
            const auto layout =
                config.MakeKvLayout(DtypeFromName(dtype), kDefaultBlockTokens);
            return std::pair(layout->bytes_per_token(LayerKind::kFull),
                             layout->bytes_per_token(LayerKind::kSliding));
          },
          py::arg("dtype") = "bf16",
          "Returns the bytes that a token takes in full-attention layers and, "
          "while it is in the window, in sliding layers. Both are 0 for models "
          "of embeddings and for drafters, which hold no conversation.")
      .def(
          "kv_bytes_at",
          [](const ModelConfig& config, size_t tokens,
             const std::string& dtype) {
            if (!HoldsConversations(config)) return size_t{0};
            return config
                .MakeKvLayout(DtypeFromName(dtype), kDefaultBlockTokens)
                ->bytes_at(tokens);
          },
          py::arg("tokens"), py::arg("dtype") = "bf16",
          "Returns the KV bytes of a conversation of this many tokens.");

  module.def("compare_with_named", &Differences, py::arg("config"),
             "Returns the named type with as many layers, heads and hidden "
             "values, \"\" if there is none, and (field, layer or None, found, "
             "expected) of each field that has another value there.");
  module.def("model_type_names", [] { return NamesOf(NamedConfigs()); },
             "Returns the names of all model types.");
}

}  // namespace gkv
