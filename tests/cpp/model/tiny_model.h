#ifndef GEMMAKV_TESTS_CPP_MODEL_TINY_MODEL_H_
#define GEMMAKV_TESTS_CPP_MODEL_TINY_MODEL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/sanitized.h"
#include "base/thread_pool.h"
#include "gemmakv/tensor_source.h"
#include "gemmakv/tensor_type.h"
#include "model/config/family.h"
#include "model/forward.h"

// Models that are small enough to run thousands of times: random weights, the
// real architecture.

namespace gkv {

// Tensors in memory, in any type.
class MemorySource : public TensorSource {
 public:
  struct Tensor {
    TensorType type;
    size_t rows, cols;
    std::vector<uint8_t> bytes;
    size_t parts = 1;
  };
  std::map<std::string, Tensor, std::less<>> tensors;

  std::string Description() const override { return "test tensors"; }
  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors) names.push_back(name);
    return names;
  }
  std::optional<TensorView> Find(std::string_view name) override {
    const auto it = tensors.find(name);
    if (it == tensors.end()) return std::nullopt;
    const Tensor& t = it->second;
    return TensorView{std::string(name), t.type, t.rows, t.cols,
                      t.bytes.data(), t.parts};
  }
  // The values of an F32 tensor.
  std::vector<float> Floats(const std::string& name) const {
    const Tensor& t = tensors.at(name);
    std::vector<float> values(t.rows * t.cols);
    std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
    return values;
  }
};

// Random bytes that are a sound tensor: scales (fp16 fields of each block)
// are small positive numbers, everything else is arbitrary.
inline std::vector<uint8_t> RandomTensor(TensorType type, size_t rows,
                                         size_t cols, std::mt19937& rng,
                                         float low, float high) {
  std::vector<uint8_t> bytes(rows * RowBytes(type, cols));
  if (type == TensorType::kF32) {
    std::uniform_real_distribution<float> uniform(low, high);
    for (size_t i = 0; i < rows * cols; ++i) {
      const float value = uniform(rng);
      std::memcpy(&bytes[4 * i], &value, 4);
    }
    return bytes;
  }
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  const size_t block = Info(type).bytes;
  const auto set_half = [&](size_t at, uint32_t exponent) {
    const uint16_t half =
        static_cast<uint16_t>((exponent << 10) | (rng() & 0x3FF));
    std::memcpy(&bytes[at], &half, 2);
  };
  for (size_t at = 0; at < bytes.size(); at += block) {
    switch (type) {
      case TensorType::kF16:
        set_half(at, 8 + rng() % 3);
        bytes[at + 1] |= static_cast<uint8_t>(rng() & 0x80);
        break;
      case TensorType::kBF16: {
        const uint16_t value = static_cast<uint16_t>(
            ((rng() & 1) << 15) | ((119 + rng() % 3) << 7) | (rng() & 0x7F));
        std::memcpy(&bytes[at], &value, 2);
        break;
      }
      case TensorType::kQ4_0:
      case TensorType::kQ5_0:
        set_half(at, 7);
        break;
      case TensorType::kQ8_0:
        set_half(at, 3);
        break;
      case TensorType::kQ4_K:
      case TensorType::kQ5_K:
        set_half(at, 2);
        set_half(at + 2, 2);
        break;
      case TensorType::kQ6_K:
        set_half(at + 208, 1);
        break;
      case TensorType::kF32:
        break;
    }
  }
  return bytes;
}

// The defaults: a Gemma 3 whose every third layer is full.
struct TinyOptions {
  std::string architecture = "gemma3";
  // Types of the matrices; one entry: all of this type. Those that must be
  // float (see TinyTensors) are of the first float type.
  std::vector<TensorType> types = {TensorType::kF32};
  size_t hidden = 64;
  size_t ffn = 96;
  size_t num_heads = 4;
  size_t kv_heads = 2;
  size_t num_layers = 7;
  std::vector<LayerKind> pattern = {LayerKind::kSliding, LayerKind::kSliding,
                                    LayerKind::kFull};  // repeated
  size_t window = 24;
  float attn_soft_cap = 0;
  float final_soft_cap = 0;
  bool qk_norm = true;
  bool post_norms = true;
  bool value_norm = false;
  bool keys_are_values = false;
  bool layer_scales = false;
  size_t ple_dim = 0;
  size_t num_experts = 0;
  size_t experts_used = 0;
  size_t expert_ffn = 0;
  bool split_experts = false;  // gates apart from the rest
  bool bidirectional = false;
  size_t dense_dim = 0;
  size_t embedding_dim = 0;
  bool ple_table = true;
  size_t altup_inputs = 0;
  size_t altup_active = 0;
  bool altup_correct_scale = false;
  size_t laurel_rank = 0;
  size_t target_hidden = 0;
  bool tied = true;
  bool biases = false;
  size_t rope_dim = 32;  // of 32
  // Blocks of 48 channels: no multiple of a quantized block.
  size_t lru_width = 0;
  size_t lru_blocks = 0;
  size_t conv_width = 0;
  uint32_t seed = 1;
  // What else the configuration differs in.
  std::function<void(ModelConfig&)> change = {};
};

// What sets a family apart, from the library's own table. Soft caps are lower
// than those of real models: tiny logits reach them. "gemma4_moe" is a Gemma 4
// with experts instead of embeddings for each layer.
constexpr std::string_view kWithExperts = "_moe";
inline TinyOptions TinyFamily(std::string_view architecture) {
  const bool experts = architecture.ends_with(kWithExperts);
  if (experts) architecture.remove_suffix(kWithExperts.size());
  const Family& family = *FindFamily(architecture);
  TinyOptions options;
  options.architecture = architecture;
  options.pattern.assign(family.pattern.begin(), family.pattern.end());
  if (!HasSlidingLayers(family)) options.window = 0;
  options.attn_soft_cap = family.attn_soft_cap == 0 ? 0 : 2;
  options.final_soft_cap = family.final_soft_cap == 0 ? 0 : 3;
  options.qk_norm = family.qk_norm;
  options.post_norms = family.post_norms;
  options.value_norm = family.value_norm;
  options.keys_are_values = family.keys_may_be_values;
  options.layer_scales = family.layer_scales;
  options.bidirectional = family.bidirectional;
  if (family.dense_factor != 0) options.dense_dim = 128;
  if (family.embedding_dim != 0) options.embedding_dim = 112;
  options.biases = family.biases;
  options.rope_dim = 32 / family.rope_share;
  options.altup_inputs = family.altup_inputs;
  options.altup_correct_scale = family.altup_correct_scale;
  if (family.altup_inputs != 0) {
    options.ple_dim = options.laurel_rank = 32;
    // Tokens without a row of their own; a layer that is sparse, one that keeps
    // half, widths by layer. The last two layers have no keys and values.
    options.change = [](ModelConfig& config) {
      config.ple_vocab = config.vocab_size - 20;
      ShareKeysValues(2, config);
      config.layers[0].sparsity_cutoff = 1.2815515;
      config.layers[2].sparsity_cutoff = 0;
      for (size_t i = 3; i < config.num_layers(); ++i) {
        config.layers[i].ffn_dim *= 2;
      }
    };
  }
  if (family.drafts) {
    // For a tiny Gemma 4.
    options.target_hidden = options.hidden;
    options.hidden = 32;
    options.num_layers = 4;
    options.change = [&family](ModelConfig& config) {
      for (LayerConfig& layer : config.layers) {
        if (layer.kind != LayerKind::kFull) continue;
        layer.head_dim = layer.rope_dim = 64;
        layer.still_pairs = 32 - 32 / family.full_turning;
        layer.kv_heads = 1;
      }
    };
  } else if (family.full_turning != 1) {
    options.ple_dim = 32;
    // Full layers of wider heads, of which one part turns. The last layer has
    // no keys and values of its own.
    options.change = [&family](ModelConfig& config) {
      ShareKeysValues(1, config);
      for (LayerConfig& layer : config.layers) {
        if (layer.kind != LayerKind::kFull) continue;
        layer.head_dim = layer.rope_dim = 64;
        layer.still_pairs = 32 - 32 / family.full_turning;
        layer.kv_heads = 1;
      }
    };
  }
  if (family.ple_projected) {
    options.ple_dim = 32;
    options.ple_table = false;
    options.change = [](ModelConfig& config) {
      for (LayerConfig& layer : config.layers) {
        if (layer.kind != LayerKind::kFull) continue;
        layer.head_dim = layer.rope_dim = 64;
        layer.kv_heads = 1;
      }
    };
  }
  if (experts) {
    options.ple_dim = 0;
    options.num_experts = 9;
    options.experts_used = 3;
    options.expert_ffn = 32;
  }
  if (HasRecurrentLayers(family)) {
    options.kv_heads = 1;
    options.lru_width = 192;
    options.lru_blocks = 4;
    options.conv_width = 4;
  }
  return options;
}

// Every family that continues texts, by architecture, for parameterized tests;
// those that may have experts with them, too. With those that give embeddings
// on request.
inline std::vector<std::string> TinyFamilies(bool embeddings = false) {
  std::vector<std::string> names;
  for (const Family& family : Families()) {
    if (family.drafts || (family.bidirectional && !embeddings)) continue;
    names.emplace_back(family.architecture);
    if (family.may_have_experts) {
      names.push_back(names.back() + std::string(kWithExperts));
    }
  }
  return names;
}

// Those whose conversations are run at length: under the sanitizers three,
// which have every kind of layer, and of part of a layer, between them.
inline std::vector<std::string> CheckedFamilies() {
  if (kSanitized) return {"gemma3", "gemma3n", "recurrentgemma"};
  return TinyFamilies();
}

// Every matrix another type: each kernel runs in the model.
inline TinyOptions MixedTypes(TinyOptions options = {}) {
  options.types = {TensorType::kQ8_0, TensorType::kQ5_0, TensorType::kQ4_K,
                   TensorType::kQ6_K, TensorType::kQ5_K, TensorType::kQ4_0,
                   TensorType::kBF16, TensorType::kF16};
  options.hidden = 256;
  options.ffn = 256;
  options.num_heads = 8;
  if (options.lru_width != 0) options.lru_width = 512;
  if (options.ple_dim != 0) options.ple_dim = 256;
  if (options.num_experts != 0) options.expert_ffn = 256;
  if (options.dense_dim != 0) options.dense_dim = 256;
  if (options.laurel_rank != 0) options.laurel_rank = 256;
  return options;
}

// For tests of what is around the kernels. Under the sanitizers the kernels run
// in their own tests and in those of the forward pass.
inline TinyOptions TypesAround(TinyOptions options = {}) {
  return kSanitized ? options : MixedTypes(std::move(options));
}

inline ModelConfig TinyConfig(const TinyOptions& options) {
  ModelConfig config;
  config.architecture = options.architecture;
  config.hidden_size = options.hidden;
  config.layers.assign(options.num_layers, {.num_heads = options.num_heads,
                                            .kv_heads = options.kv_heads,
                                            .head_dim = 32,
                                            .ffn_dim = options.ffn});
  RepeatKinds(options.pattern, config);
  for (LayerConfig& layer : config.layers) {
    const bool slides = layer.kind == LayerKind::kSliding;
    layer.window = slides ? options.window : 0;
    layer.rope_dim = options.rope_dim;
    layer.rope_base = slides ? 1e4 : 1e6;
    layer.rope_factor = slides ? 1 : 2;
  }
  config.vocab_size = 97;
  config.context_length = 1024;
  config.embedding_scale = DefaultEmbeddingScale(options.hidden);
  config.query_scale = 0.17;
  config.attn_soft_cap = options.attn_soft_cap;
  config.final_soft_cap = options.final_soft_cap;
  config.qk_norm = options.qk_norm;
  config.post_norms = options.post_norms;
  config.value_norm = options.value_norm;
  config.keys_are_values = options.keys_are_values;
  config.layer_scales = options.layer_scales;
  config.bidirectional = options.bidirectional;
  config.dense_dim = options.dense_dim;
  config.embedding_dim = options.embedding_dim;
  config.ple_dim = options.ple_dim;
  if (options.ple_dim != 0 && options.ple_table) {
    config.ple_vocab = config.vocab_size + 3;
  }
  config.num_experts = options.num_experts;
  config.experts_used = options.experts_used;
  config.expert_ffn_dim = options.expert_ffn;
  config.altup_inputs = options.altup_inputs;
  config.altup_active = options.altup_active;
  config.altup_correct_scale = options.altup_correct_scale;
  config.laurel_rank = options.laurel_rank;
  config.target_hidden = options.target_hidden;
  config.biases = options.biases;
  config.lru_width = options.lru_width;
  config.lru_blocks = options.lru_blocks;
  config.conv_width = options.conv_width;
  config.eos_ids = {1};
  if (options.change) options.change(config);
  return config;
}

// Layers that differ in all that they may differ in, at random: heads and
// rotations by kind, two windows, feed-forward widths, and some that read the
// keys and values of an earlier one. Each kind of pair is there.
inline TinyOptions LayersDiffer(TinyOptions options, uint32_t seed = 1) {
  options.num_layers = 12;
  options.change = [seed](ModelConfig& config) {
    std::mt19937 rng(seed);
    for (size_t i = 0; i < config.num_layers(); ++i) {
      LayerConfig& layer = config.layers[i];
      layer.ffn_dim *= 1 + rng() % 2;
      if (layer.kind == LayerKind::kFull) {
        layer.head_dim = 64;
        layer.num_heads /= 2;
        layer.kv_heads = 1;
        layer.rope_dim = 48;
        layer.still_pairs = 9;
      } else if (rng() % 2 == 0) {
        layer.window = 10;
        layer.rope_base = 300;
      }
      for (size_t owner = 0; owner < i && rng() % 3 != 0; ++owner) {
        const LayerConfig& other = config.layers[owner];
        if (!other.shares_kv && other.kind == layer.kind &&
            other.window == layer.window) {
          layer.shares_kv = owner;
        }
      }
    }
  };
  return options;
}

// Makes the tensors of a tiny model, in the order in which they are asked for.
class TinyTensorMaker {
 public:
  explicit TinyTensorMaker(const TinyOptions& options)
      : options_(options), config_(TinyConfig(options)), rng_(options.seed) {}

  MemorySource Run() {
    const size_t hidden = options_.hidden;
    Matrix("token_embd.weight", config_.vocab_size, hidden);
    if (!options_.tied) Matrix("output.weight", config_.vocab_size, hidden);
    Norm("output_norm.weight", hidden);
    const size_t ple = config_.ple_dim;
    if (ple != 0) {
      const size_t all = ple * config_.num_layers();
      if (config_.ple_vocab != 0) {
        Matrix("per_layer_token_embd.weight", config_.ple_vocab, all);
      }
      Matrix("per_layer_model_proj.weight", all, hidden);
      Norm("per_layer_proj_norm.weight", ple);
    }
    for (size_t i = 1; i < options_.altup_inputs; ++i) {
      const std::string end = "." + std::to_string(i - 1) + ".weight";
      Matrix("altup_proj" + end, hidden, hidden);
      Matrix("altup_unembd_proj" + end, hidden, hidden);
    }
    for (size_t i = 0; i < config_.num_layers(); ++i) Layer(i);
    prefix_.clear();
    if (config_.dense_dim != 0) {
      Matrix("dense_2.weight", config_.dense_dim, hidden);
      Matrix("dense_3.weight", hidden, config_.dense_dim);
    }
    if (config_.embedding_dim != 0) {
      Matrix("embedding_projection.weight", config_.embedding_dim, hidden);
    }
    if (config_.target_hidden != 0) Drafter();
    return std::move(source_);
  }

 private:
  void Layer(size_t layer) {
    const size_t hidden = options_.hidden;
    prefix_ = "blk." + std::to_string(layer) + ".";
    Norm("attn_norm.weight", hidden);
    const LayerConfig& shape = config_.layers[layer];
    if (shape.kind == LayerKind::kRecurrent) {
      Recurrent();
    } else {
      Attention(shape);
    }
    Norm("ffn_norm.weight", hidden);
    Linear("ffn_gate", shape.ffn_dim, hidden);
    Linear("ffn_up", shape.ffn_dim, hidden);
    Linear("ffn_down", hidden, shape.ffn_dim);
    if (options_.post_norms) {
      Norm("post_attention_norm.weight", hidden);
      Norm("post_ffw_norm.weight", hidden);
    }
    if (options_.ple_dim != 0) {
      Matrix("inp_gate.weight", options_.ple_dim, hidden);
      Matrix("proj.weight", hidden, options_.ple_dim);
      Norm("post_norm.weight", hidden);
    }
    if (options_.num_experts != 0) Experts();
    if (options_.altup_inputs != 0) Streams();
    if (options_.laurel_rank != 0) {
      Matrix("laurel_l.weight", options_.laurel_rank, hidden);
      Matrix("laurel_r.weight", hidden, options_.laurel_rank);
      Norm("laurel_post_norm.weight", hidden);
    }
    if (options_.layer_scales) {
      Floats("layer_output_scale.weight", 1, 1, 0.6f, 1.4f);
    }
  }
  void Attention(const LayerConfig& layer) {
    const size_t q_dim = layer.num_heads * layer.head_dim;
    const size_t kv_dim = layer.kv_heads * layer.head_dim;
    Matrix("attn_q.weight", q_dim, options_.hidden);
    const bool own = !layer.shares_kv && config_.target_hidden == 0;
    if (own) {
      Matrix("attn_k.weight", kv_dim, options_.hidden);
      if (!options_.keys_are_values || layer.kind != LayerKind::kFull) {
        Matrix("attn_v.weight", kv_dim, options_.hidden);
      }
    }
    if (options_.qk_norm) {
      Norm("attn_q_norm.weight", layer.head_dim);
      if (own) Norm("attn_k_norm.weight", layer.head_dim);
    }
    Linear("attn_output", options_.hidden, q_dim);
  }
  void Drafter() {
    const size_t hidden = options_.hidden, target = config_.target_hidden;
    Matrix("nextn.pre_projection.weight", hidden, 2 * target);
    Matrix("nextn.post_projection.weight", target, hidden);
    const size_t count = config_.num_centroids;
    if (count == 0) return;
    Matrix("masked_embd_centroids.weight", count, hidden);
    std::vector<float> order(config_.vocab_size);
    std::iota(order.begin(), order.end(), 0.0f);
    std::shuffle(order.begin(), order.end(), rng_);
    std::vector<uint8_t> bytes(order.size() * sizeof(float));
    std::memcpy(bytes.data(), order.data(), bytes.size());
    source_.tensors["masked_embd_ordering"] = {
        TensorType::kF32, 1, order.size(), std::move(bytes), 1};
  }
  // Scores of the router are far apart, so that what rounding does to them
  // changes no choice.
  void Experts() {
    const size_t hidden = options_.hidden, count = options_.num_experts;
    const size_t width = options_.expert_ffn;
    Put("ffn_gate_inp.weight", FloatType(), count, hidden, -1, 1);
    Floats("ffn_gate_inp.scale", 1, hidden, 3, 9);
    Floats("ffn_down_exps.scale", 1, count, 0.5f, 1.5f);
    Norm("post_ffw_norm_1.weight", hidden);
    Norm("pre_ffw_norm_2.weight", hidden);
    Norm("post_ffw_norm_2.weight", hidden);
    if (options_.split_experts) {
      Parts("ffn_gate_exps.weight", width, hidden);
      Parts("ffn_up_exps.weight", width, hidden);
    } else {
      Parts("ffn_gate_up_exps.weight", 2 * width, hidden);
    }
    Parts("ffn_down_exps.weight", hidden, width);
  }
  void Streams() {
    const size_t inputs = options_.altup_inputs, hidden = options_.hidden;
    Norm("altup_router_norm.weight", hidden);
    // Sums of about 1, over as many terms as a row has.
    const float high = 2 * std::sqrt(static_cast<float>(hidden));
    Floats("altup_router.weight", inputs, hidden, -high, high);
    Floats("altup_predict_coef.weight", inputs * inputs, inputs, -0.2f, 0.2f);
    Floats("altup_correct_coef.weight", inputs, inputs, -0.3f, 0.3f);
    if (options_.altup_correct_scale) {
      Floats("altup_correct_scale.weight", 1, hidden, 0.5f, 1.5f);
    }
  }
  void Recurrent() {
    const size_t width = options_.lru_width;
    Linear("rec_x", width, options_.hidden);
    Linear("rec_y", width, options_.hidden);
    Linear("rec_output", options_.hidden, width);
    Floats("rec_conv.weight", width, options_.conv_width, -0.6f, 0.6f);
    Floats("rec_conv.bias", 1, width, -0.3f, 0.3f);
    for (const char* gate : {"rec_input_gate", "rec_a_gate"}) {
      const std::string name = gate;
      Put(name + ".weight", FloatType(), width, width / options_.lru_blocks,
          -0.3f, 0.3f);
      Floats(name + ".bias", 1, width, -1, 1);
    }
    // States that live for between one and a few hundred positions.
    Floats("rec_a_param", 1, width, -7, 1);
  }

  void Matrix(const std::string& name, size_t rows, size_t cols) {
    const auto& types = options_.types;
    Put(name, types[next_type_++ % types.size()], rows, cols, -0.2f, 0.2f);
  }
  // A matrix for each expert.
  void Parts(const std::string& name, size_t rows, size_t cols) {
    Matrix(name, options_.num_experts * rows, cols);
    source_.tensors.at(prefix_ + name).parts = options_.num_experts;
  }
  void Linear(const std::string& name, size_t rows, size_t cols) {
    Matrix(name + ".weight", rows, cols);
    if (options_.biases) Floats(name + ".bias", 1, rows, -0.5f, 0.5f);
  }
  void Norm(const std::string& name, size_t size) {
    Floats(name, 1, size, 0.5f, 1.5f);
  }
  void Floats(const std::string& name, size_t rows, size_t cols, float low,
              float high) {
    Put(name, TensorType::kF32, rows, cols, low, high);
  }
  void Put(const std::string& name, TensorType type, size_t rows, size_t cols,
           float low, float high) {
    source_.tensors[prefix_ + name] = {
        type, rows, cols, RandomTensor(type, rows, cols, rng_, low, high), 1};
  }
  TensorType FloatType() const {
    for (const TensorType type : options_.types) {
      if (!UsesQuantizedActivations(type)) return type;
    }
    return TensorType::kF32;
  }

  const TinyOptions& options_;
  const ModelConfig config_;
  std::mt19937 rng_;
  MemorySource source_;
  size_t next_type_ = 0;
  std::string prefix_;
};

inline MemorySource TinyTensors(const TinyOptions& options) {
  return TinyTensorMaker(options).Run();
}

inline std::shared_ptr<const Model> TinyModel(const TinyOptions& options) {
  MemorySource source = TinyTensors(options);
  ThreadPool pool(1);
  const ModelConfig config = TinyConfig(options);
  return std::make_shared<Model>(config, LoadWeights(config, source, pool, {}));
}

inline std::vector<int32_t> RandomTokens(size_t count, uint32_t seed,
                                         size_t vocab_size = 97) {
  std::mt19937 rng(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(rng() % vocab_size);
  }
  return tokens;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_MODEL_TINY_MODEL_H_
