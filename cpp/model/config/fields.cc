#include "model/config/fields.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "base/error.h"
#include "ops/recurrent.h"

namespace gkv {
namespace {

using M = ModelConfig;
using L = LayerConfig;

// Far above any model that exists, far below where size products overflow.
constexpr double kMaxSize = 1 << 24;
constexpr double kMaxLayers = 4096;

std::vector<double> AllHeads(const M& config);
std::vector<double> WholeHead(const M& config);
std::vector<double> RootOfWidth(const M& config) {
  return {DefaultEmbeddingScale(config.hidden_size)};
}

// In the order of the hash.
constexpr Field kFields[] = {
    {.name = "hidden_size", .member = &M::hidden_size,
     .low = 1, .high = kMaxSize,
     .gguf = "embedding_length", .json = "hidden_size"},
    {.name = "num_layers", .member = &M::num_layers,
     .low = 1, .high = kMaxLayers,
     .gguf = "block_count", .json = "num_hidden_layers"},
    {.name = "num_heads", .member = &L::num_heads,
     .low = 1, .high = 4096,
     .gguf = "attention.head_count", .json = "num_attention_heads"},
    {.name = "kv_heads", .member = &L::kv_heads,
     .low = 1, .high = 4096, .derived = AllHeads,
     .gguf = "attention.head_count_kv", .json = "num_key_value_heads"},
    {.name = "head_dim", .member = &L::head_dim,
     .low = 32, .high = 512,
     .gguf = "attention.key_length", .json = "head_dim"},
    {.name = "ffn_dim", .member = &L::ffn_dim,
     .low = 1, .high = kMaxSize,
     .gguf = "feed_forward_length", .json = "intermediate_size"},
    {.name = "vocab_size", .member = &M::vocab_size,
     .low = 1, .high = kMaxSize, .json = "vocab_size"},
    {.name = "context_length", .member = &M::context_length,
     .low = 1, .high = kMaxSize,
     .gguf = "context_length", .json = "max_position_embeddings",
     .mark = Field::kNever},
    {.name = "sliding_window", .member = &L::window,
     .layers = kSlidingLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .gguf = "attention.sliding_window"},
    {.name = "rms_epsilon", .member = &M::rms_epsilon, .fallback = 1e-6,
     .gguf = "attention.layer_norm_rms_epsilon", .json = "rms_norm_eps"},
    {.name = "query_scale", .member = &M::query_scale},
    {.name = "attn_soft_cap", .member = &M::attn_soft_cap, .fallback = 0,
     .gguf = "attn_logit_softcapping"},
    {.name = "final_soft_cap", .member = &M::final_soft_cap, .fallback = 0,
     .gguf = "final_logit_softcapping"},
    {.name = "rope_base_full", .member = &L::rope_base,
     .layers = kFullLayers, .low = 1.001, .fallback = 1e4,
     .gguf = "rope.freq_base"},
    {.name = "rope_base_sliding", .member = &L::rope_base,
     .layers = kSlidingLayers, .low = 1.001, .fallback = 1e4,
     .gguf = "rope.freq_base_swa"},
    {.name = "rope_factor_full", .member = &L::rope_factor,
     .layers = kFullLayers, .low = 1, .fallback = 1},
    {.name = "qk_norm", .member = &M::qk_norm, .high = 1},
    {.name = "post_norms", .member = &M::post_norms, .high = 1},
    {.name = "embedding_scale", .member = &M::embedding_scale,
     .derived = RootOfWidth, .mark = 1},
    {.name = "rope_dim", .member = &L::rope_dim,
     .low = 2, .high = 512, .derived = WholeHead,
     .gguf = "rope.dimension_count", .mark = 2},
    {.name = "biases", .member = &M::biases, .high = 1, .fallback = 0,
     .mark = 3},
    {.name = "lru_width", .member = &M::lru_width,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .json = "lru_width", .mark = 4},
    {.name = "lru_blocks", .member = &M::lru_blocks,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .mark = 4},
    {.name = "conv_width", .member = &M::conv_width,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxConvWidth,
     .fallback = 0, .json = "conv1d_width", .mark = 4},
    {.name = "shares_kv", .member = &L::shares_kv,
     .layers = kAttentionLayers, .low = -1, .high = kMaxLayers,
     .fallback = -1, .mark = 5},
    {.name = "rope_factor_sliding", .member = &L::rope_factor,
     .layers = kSlidingLayers, .low = 1, .fallback = 1, .mark = 6},
};

std::vector<double> AllHeads(const M& config) {
  return FieldNamed("num_heads").Get(config);
}
std::vector<double> WholeHead(const M& config) {
  return FieldNamed("head_dim").Get(config);
}

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

bool Reads(LayerKind kind, LayerSet layers) {
  return (layers >> static_cast<uint32_t>(kind) & 1) != 0;
}

template <typename T>
double Number(const T& value) {
  return static_cast<double>(value);
}
double Number(const std::optional<size_t>& value) {
  return value ? static_cast<double>(*value) : -1;
}

template <typename T>
void Assign(double value, T& member) {
  member = static_cast<T>(value);
}
void Assign(double value, std::optional<size_t>& member) {
  member.reset();
  if (value >= 0) member = static_cast<size_t>(value);
}

}  // namespace

std::span<const Field> Fields() { return kFields; }

const Field& FieldNamed(std::string_view name) {
  return *std::find_if(std::begin(kFields), std::end(kFields),
                       [&](const Field& field) { return field.name == name; });
}

Field::Type Field::type() const {
  return std::visit(
      Overloaded{
          [](bool M::*) { return Type::kFlag; },
          [](float M::*) { return Type::kReal; },
          [](double M::*) { return Type::kReal; },
          [](double L::*) { return Type::kReal; },
          [](const auto&) { return Type::kSize; },
      },
      member);
}

bool Field::IsRead(const M& config) const {
  return layers == kAllLayers ||
         std::any_of(config.layers.begin(), config.layers.end(),
                     [&](const L& layer) { return Reads(layer.kind, layers); });
}

std::vector<double> Field::Get(const M& config) const {
  const auto by_layer = [&]<typename T>(T L::*of) -> std::vector<double> {
    // Of layers that do not read it: what a layer is made with.
    const double none = Number(L{}.*of);
    std::vector<double> all, read;
    for (const L& layer : config.layers) {
      const bool reads = Reads(layer.kind, layers);
      all.push_back(reads ? Number(layer.*of) : none);
      if (reads) read.push_back(all.back());
    }
    if (read.empty()) return {none};
    const bool differ = std::any_of(read.begin(), read.end(),
                                    [&](double v) { return v != read[0]; });
    return differ ? all : std::vector<double>{read[0]};
  };
  return std::visit(
      Overloaded{
          by_layer,
          [&](size_t (M::*of)() const) {
            return std::vector<double>{Number((config.*of)())};
          },
          [&]<typename T>(T M::*of) {
            return std::vector<double>{Number(config.*of)};
          },
      },
      member);
}

void Field::Set(M& config, std::span<const double> values) const {
  std::visit(
      Overloaded{
          [&]<typename T>(T L::*of) {
            for (size_t i = 0; i < config.layers.size(); ++i) {
              L& layer = config.layers[i];
              if (!Reads(layer.kind, layers)) continue;
              Assign(values[values.size() == 1 ? 0 : i], layer.*of);
            }
          },
          [&](size_t (M::*)() const) {
            config.layers.resize(static_cast<size_t>(values[0]));
          },
          [&]<typename T>(T M::*of) { Assign(values[0], config.*of); },
      },
      member);
}

void Field::Check(const M& config, std::span<const double> values,
                  const std::string& name) const {
  const bool by_layer = std::visit(
      Overloaded{[]<typename T>(T L::*) { return true; },
                 [](const auto&) { return false; }},
      member);
  if (values.size() != 1 && !(by_layer && values.size() == config.num_layers())) {
    throw InvalidArgument(StrCat(
        name, " has ", values.size(), " entries, expected one number",
        by_layer ? StrCat(" or one for each of ", config.num_layers(), " layers")
                 : ""));
  }
  const bool read = IsRead(config);
  for (size_t i = 0; i < values.size(); ++i) {
    if (by_layer && !(values.size() == 1 ? read
                                         : Reads(config.layers[i].kind, layers))) {
      continue;
    }
    const double value = values[i];
    const double least = read ? low : 0, most = read ? high : 0;
    if (value >= least && value <= most && std::isfinite(value) &&
        (type() == Type::kReal || value == std::floor(value))) {
      continue;
    }
    std::ostringstream text;
    text.precision(15);
    text << name;
    if (values.size() > 1) text << " of layer " << i;
    text << " is " << value << ", expected ";
    if (type() == Type::kReal) {
      text << "a finite number >= " << least;
    } else {
      text << least << ".." << most;
    }
    throw InvalidArgument(text.str());
  }
}

std::vector<double> Field::Default(const M& config) const {
  if (derived != nullptr) return derived(config);
  if (fallback) return {*fallback};
  return {};
}

}  // namespace gkv
