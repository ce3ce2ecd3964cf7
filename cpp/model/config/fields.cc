#include "model/config/fields.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "model/config/family.h"
#include "ops/altup.h"
#include "ops/recurrent.h"

namespace gkv {
namespace {

using M = ModelConfig;
using L = LayerConfig;
using F = Family;

// Far above any model that exists, far below where size products overflow.
constexpr double kMaxSize = 1 << 24;
constexpr double kMaxLayers = 4096;
constexpr double kNone = -std::numeric_limits<double>::infinity();

std::vector<double> AllHeads(const M& config);
std::vector<double> WholeHead(const M& config);
std::vector<double> RootOfWidth(const M& config) {
  return {DefaultEmbeddingScale(config.hidden_size)};
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

template <auto kMember, typename T, typename Owner>
constexpr Field::Access AccessTo(T Owner::*) {
  constexpr bool kByLayer = std::is_same_v<Owner, L>;
  return {std::is_same_v<T, bool>           ? Field::Type::kFlag
          : std::is_floating_point_v<T> ? Field::Type::kReal
                                        : Field::Type::kSize,
          kByLayer,
          [](const M& config, size_t layer) {
            if constexpr (kByLayer) {
              return Number(config.layers[layer].*kMember);
            } else {
              return Number(config.*kMember);
            }
          },
          [](M& config, size_t layer, double value) {
            if constexpr (kByLayer) {
              Assign(value, config.layers[layer].*kMember);
            } else {
              Assign(value, config.*kMember);
            }
          }};
}
template <auto kMember>
constexpr Field::Access kAt = AccessTo<kMember>(kMember);
constexpr Field::Access kNumLayers = {
    Field::Type::kSize, false,
    [](const M& config, size_t) { return Number(config.num_layers()); },
    [](M& config, size_t, double value) {
      config.layers.resize(static_cast<size_t>(value));
    }};

template <auto kMember>
constexpr double (*kOf)(const Family&) = [](const Family& family) {
  return Number(family.*kMember);
};

// In the order of the hash.
constexpr Field kFields[] = {
    {.name = "hidden_size", .at = kAt<&M::hidden_size>,
     .low = 1, .high = kMaxSize,
     .gguf = "embedding_length", .json = "hidden_size"},
    {.name = "num_layers", .at = kNumLayers,
     .low = 1, .high = kMaxLayers,
     .gguf = "block_count", .json = "num_hidden_layers"},
    {.name = "num_heads", .at = kAt<&L::num_heads>,
     .low = 1, .high = 4096,
     .gguf = "attention.head_count", .json = "num_attention_heads"},
    {.name = "kv_heads", .at = kAt<&L::kv_heads>,
     .low = 1, .high = 4096, .derived = AllHeads,
     .gguf = "attention.head_count_kv", .json = "num_key_value_heads"},
    {.name = "head_dim", .at = kAt<&L::head_dim>, .low = 32, .high = 512,
     .gguf = "attention.key_length", .gguf_swa = true,
     .gguf_also = {"head_dim"}, .json = "head_dim"},
    {.name = "ffn_dim", .at = kAt<&L::ffn_dim>,
     .low = 1, .high = kMaxSize,
     .gguf = "feed_forward_length", .json = "intermediate_size"},
    {.name = "vocab_size", .at = kAt<&M::vocab_size>, .low = 1,
     .high = kMaxSize, .family = kOf<&F::vocab_size>, .json = "vocab_size"},
    {.name = "context_length", .at = kAt<&M::context_length>,
     .low = 1, .high = kMaxSize,
     .gguf = "context_length", .json = "max_position_embeddings",
     .mark = Field::kNever},
    {.name = "sliding_window", .at = kAt<&L::window>,
     .layers = kSlidingLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .gguf = "attention.sliding_window"},
    {.name = "rms_epsilon", .at = kAt<&M::rms_epsilon>, .fallback = 1e-6,
     .gguf = "attention.layer_norm_rms_epsilon", .json = "rms_norm_eps"},
    {.name = "query_scale", .at = kAt<&M::query_scale>,
     .gguf_also = {"attention.scale"}},
    {.name = "attn_soft_cap", .at = kAt<&M::attn_soft_cap>, .fallback = 0,
     .family = kOf<&F::attn_soft_cap>, .gguf = "attn_logit_softcapping"},
    {.name = "final_soft_cap", .at = kAt<&M::final_soft_cap>, .fallback = 0,
     .family = kOf<&F::final_soft_cap>, .gguf = "final_logit_softcapping"},
    {.name = "rope_base_full", .at = kAt<&L::rope_base>, .layers = kFullLayers,
     .low = 1.001, .fallback = 1e4, .gguf = "rope.freq_base",
     .gguf_also = {"rope.global.freq_base"}},
    {.name = "rope_base_sliding", .at = kAt<&L::rope_base>,
     .layers = kSlidingLayers, .low = 1.001, .fallback = 1e4,
     .gguf = "rope.freq_base_swa",
     .gguf_also = {"rope.local.freq_base", "rope.freq_base_local"}},
    {.name = "rope_factor_full", .at = kAt<&L::rope_factor>,
     .layers = kFullLayers, .low = 1, .fallback = 1},
    {.name = "qk_norm", .at = kAt<&M::qk_norm>, .high = 1,
     .family = kOf<&F::qk_norm>},
    {.name = "post_norms", .at = kAt<&M::post_norms>, .high = 1,
     .family = kOf<&F::post_norms>},
    {.name = "embedding_scale", .at = kAt<&M::embedding_scale>,
     .derived = RootOfWidth, .gguf_also = {"embedding_scale"}, .mark = 1},
    {.name = "rope_dim", .at = kAt<&L::rope_dim>, .low = 2, .high = 512,
     .derived = WholeHead, .gguf = "rope.dimension_count", .gguf_swa = true,
     .mark = 2},
    {.name = "biases", .at = kAt<&M::biases>, .high = 1, .fallback = 0,
     .family = kOf<&F::biases>, .mark = 3},
    {.name = "lru_width", .at = kAt<&M::lru_width>,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .json = "lru_width", .mark = 4},
    {.name = "lru_blocks", .at = kAt<&M::lru_blocks>,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxSize, .fallback = 0,
     .mark = 4},
    {.name = "conv_width", .at = kAt<&M::conv_width>,
     .layers = kRecurrentLayers, .low = 1, .high = kMaxConvWidth,
     .fallback = 0, .json = "conv1d_width", .mark = 4},
    {.name = "shares_kv", .at = kAt<&L::shares_kv>,
     .layers = kAttentionLayers, .low = -1, .high = kMaxLayers,
     .fallback = -1, .mark = 5},
    {.name = "rope_factor_sliding", .at = kAt<&L::rope_factor>,
     .layers = kSlidingLayers, .low = 1, .fallback = 1, .mark = 6},
    {.name = "still_pairs", .at = kAt<&L::still_pairs>,
     .layers = kAttentionLayers, .high = 256, .fallback = 0, .mark = 7},
    {.name = "value_norm", .at = kAt<&M::value_norm>, .high = 1, .fallback = 0,
     .family = kOf<&F::value_norm>, .mark = 8},
    {.name = "keys_are_values", .at = kAt<&M::keys_are_values>, .high = 1,
     .fallback = 0, .mark = 9},
    {.name = "layer_scales", .at = kAt<&M::layer_scales>, .high = 1,
     .fallback = 0, .family = kOf<&F::layer_scales>, .mark = 10},
    {.name = "ple_dim", .at = kAt<&M::ple_dim>, .high = 4096,
     .fallback = 0, .gguf = "embedding_length_per_layer_input", .mark = 11},
    {.name = "ple_vocab", .at = kAt<&M::ple_vocab>, .high = kMaxSize,
     .fallback = 0, .mark = 11},
    {.name = "num_experts", .at = kAt<&M::num_experts>, .high = 4096,
     .fallback = 0, .gguf = "expert_count", .mark = 30},
    {.name = "experts_used", .at = kAt<&M::experts_used>, .high = 4096,
     .fallback = 0, .gguf = "expert_used_count", .mark = 30},
    {.name = "expert_ffn_dim", .at = kAt<&M::expert_ffn_dim>,
     .high = 65536, .fallback = 0, .gguf = "expert_feed_forward_length",
     .mark = 30},
    // Models of embeddings.
    {.name = "bidirectional", .at = kAt<&M::bidirectional>, .high = 1,
     .fallback = 0, .family = kOf<&F::bidirectional>, .mark = 40},
    {.name = "dense_dim", .at = kAt<&M::dense_dim>, .high = kMaxSize,
     .fallback = 0, .gguf = "dense_2_feat_out", .mark = 41},
    {.name = "embedding_dim", .at = kAt<&M::embedding_dim>, .high = kMaxSize,
     .fallback = 0, .mark = 42},
    // Drafters.
    {.name = "target_hidden", .at = kAt<&M::target_hidden>, .high = kMaxSize,
     .fallback = 0, .mark = 50},
    {.name = "num_centroids", .at = kAt<&M::num_centroids>, .high = kMaxSize,
     .fallback = 0, .mark = 51},
    {.name = "centroids_used", .at = kAt<&M::centroids_used>,
     .high = kMaxSize, .fallback = 0, .mark = 51},
    // AltUp, LAuReL, activation sparsity.
    {.name = "altup_inputs", .at = kAt<&M::altup_inputs>,
     .high = kMaxAltUpInputs, .fallback = 0, .family = kOf<&F::altup_inputs>,
     .gguf = "altup.num_inputs", .json = "altup_num_inputs", .mark = 20},
    {.name = "altup_active", .at = kAt<&M::altup_active>,
     .high = kMaxAltUpInputs, .fallback = 0,
     .gguf = "altup.active_idx", .mark = 20},
    {.name = "altup_correct_scale", .at = kAt<&M::altup_correct_scale>,
     .high = 1, .fallback = 0, .family = kOf<&F::altup_correct_scale>,
     .gguf_also = {"altup.correct_scale"}, .mark = 21},
    {.name = "laurel_rank", .at = kAt<&M::laurel_rank>, .high = kMaxSize,
     .fallback = 0, .family = kOf<&F::laurel_rank>, .json = "laurel_rank",
     .mark = 22},
    {.name = "sparsity_cutoff", .at = kAt<&L::sparsity_cutoff>,
     .low = kNone, .fallback = kNone,
     .gguf = "activation_sparsity_scale", .mark = 23},
};

std::vector<double> AllHeads(const M& config) {
  return FieldNamed("num_heads").Get(config);
}
std::vector<double> WholeHead(const M& config) {
  return FieldNamed("head_dim").Get(config);
}

}  // namespace

std::span<const Field> Fields() { return kFields; }

const Field& FieldNamed(std::string_view name) {
  return *std::find_if(std::begin(kFields), std::end(kFields),
                       [&](const Field& field) { return field.name == name; });
}

bool Field::IsReadIn(const LayerConfig& layer) const {
  return (layers >> static_cast<uint32_t>(layer.kind) & 1) != 0;
}

std::vector<double> Field::Get(const M& config) const {
  if (!at.by_layer) return {at.get(config, 0)};
  // Layers that do not read the field have the value that a layer is made with.
  static const M kMade = [] {
    M made;
    made.layers.resize(1);
    return made;
  }();
  std::vector<double> all(config.num_layers(), at.get(kMade, 0)), read;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!IsReadIn(config.layers[i])) continue;
    read.push_back(all[i] = at.get(config, i));
  }
  if (read.empty()) return {at.get(kMade, 0)};
  const bool differ = std::any_of(read.begin(), read.end(),
                                  [&](double v) { return v != read[0]; });
  return differ ? all : std::vector<double>{read[0]};
}

std::optional<double> Field::First(const M& config) const {
  if (!at.by_layer) return at.get(config, 0);
  for (size_t i = 0; i < config.num_layers(); ++i) {
    if (IsReadIn(config.layers[i])) return at.get(config, i);
  }
  return std::nullopt;
}

void Field::Set(M& config, std::span<const double> values) const {
  if (!at.by_layer) return at.set(config, 0, values[0]);
  for (size_t i = 0; i < config.num_layers(); ++i) {
    if (!IsReadIn(config.layers[i])) continue;
    at.set(config, i, NumberAt(values, i));
  }
}

void Field::Check(const M& config, std::span<const double> values,
                  const std::string& name) const {
  const bool one = values.size() == 1;
  if (!one && !(at.by_layer && values.size() == config.num_layers())) {
    throw InvalidArgument(
        StrCat(name, " has ", values.size(), " entries, expected one number",
               at.by_layer ? StrCat(" or one for each of ",
                                    config.num_layers(), " layers")
                           : ""));
  }
  const bool read =
      layers == kAllLayers ||
      std::any_of(config.layers.begin(), config.layers.end(),
                  [&](const L& layer) { return IsReadIn(layer); });
  for (size_t i = 0; i < values.size(); ++i) {
    if (at.by_layer && !(one ? read : IsReadIn(config.layers[i]))) continue;
    const double value = values[i];
    const double least = read ? low : 0, most = read ? high : 0;
    if (value >= least && value <= most &&
        (std::isfinite(value) || value == kNone) &&
        (at.type == Type::kReal || value == std::floor(value))) {
      continue;
    }
    std::ostringstream text;
    text.precision(15);
    text << name;
    if (!one) text << " of layer " << i;
    text << " is " << value << ", expected ";
    if (at.type == Type::kReal) {
      text << "a finite number";
      if (least != kNone) text << " >= " << least;
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
