#ifndef GEMMAKV_TESTS_CPP_MODEL_TINY_MODEL_H_
#define GEMMAKV_TESTS_CPP_MODEL_TINY_MODEL_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/tensor_type.h"
#include "base/thread_pool.h"
#include "io/tensor_source.h"
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
                      t.bytes.data()};
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

struct TinyOptions {
  // Types of the matrices; one entry: all of this type.
  std::vector<TensorType> types = {TensorType::kF32};
  size_t hidden = 64;
  size_t ffn = 96;
  size_t num_heads = 4;
  size_t kv_heads = 2;
  size_t num_layers = 7;
  size_t period = 3;  // every third layer is full
  size_t window = 24;
  float attn_soft_cap = 0;
  float final_soft_cap = 0;
  bool qk_norm = true;
  bool post_norms = true;
  bool tied = true;
  uint32_t seed = 1;
};

// Every matrix another type: each kernel runs in the model.
inline TinyOptions MixedTypes() {
  TinyOptions options;
  options.types = {TensorType::kQ8_0, TensorType::kQ5_0, TensorType::kQ4_K,
                   TensorType::kQ6_K, TensorType::kQ5_K, TensorType::kQ4_0,
                   TensorType::kBF16, TensorType::kF16};
  options.hidden = 256;
  options.ffn = 256;
  options.num_heads = 8;
  return options;
}

inline ModelConfig TinyConfig(const TinyOptions& options) {
  ModelConfig config;
  config.architecture = "gemma3";
  config.hidden_size = options.hidden;
  config.num_layers = options.num_layers;
  config.num_heads = options.num_heads;
  config.kv_heads = options.kv_heads;
  config.head_dim = 32;
  config.ffn_dim = options.ffn;
  config.vocab_size = 97;
  config.context_length = 1024;
  config.sliding_window = options.window;
  config.layer_kinds = PeriodicLayerKinds(options.num_layers, options.period);
  config.embedding_scale = DefaultEmbeddingScale(options.hidden);
  config.rope_dim = config.head_dim;
  config.query_scale = 0.17;
  config.attn_soft_cap = options.attn_soft_cap;
  config.final_soft_cap = options.final_soft_cap;
  config.rope_base_full = 1e6;
  config.rope_base_sliding = 1e4;
  config.rope_factor_full = 2;
  config.qk_norm = options.qk_norm;
  config.post_norms = options.post_norms;
  config.eos_ids = {1};
  return config;
}

inline MemorySource TinyTensors(const TinyOptions& options) {
  const ModelConfig config = TinyConfig(options);
  MemorySource source;
  std::mt19937 rng(options.seed);
  size_t next_type = 0;
  const auto matrix = [&](const std::string& name, size_t rows, size_t cols) {
    const TensorType type = options.types[next_type++ % options.types.size()];
    source.tensors[name] = {type, rows, cols,
                            RandomTensor(type, rows, cols, rng, -0.2f, 0.2f)};
  };
  const auto vector = [&](const std::string& name, size_t size) {
    source.tensors[name] = {
        TensorType::kF32, 1, size,
        RandomTensor(TensorType::kF32, 1, size, rng, 0.5f, 1.5f)};
  };
  const size_t q_dim = config.num_heads * config.head_dim;
  const size_t kv_dim = config.kv_heads * config.head_dim;
  matrix("token_embd.weight", config.vocab_size, options.hidden);
  if (!options.tied) {
    matrix("output.weight", config.vocab_size, options.hidden);
  }
  vector("output_norm.weight", options.hidden);
  for (size_t i = 0; i < config.num_layers; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    vector(prefix + "attn_norm.weight", options.hidden);
    matrix(prefix + "attn_q.weight", q_dim, options.hidden);
    matrix(prefix + "attn_k.weight", kv_dim, options.hidden);
    matrix(prefix + "attn_v.weight", kv_dim, options.hidden);
    if (options.qk_norm) {
      vector(prefix + "attn_q_norm.weight", config.head_dim);
      vector(prefix + "attn_k_norm.weight", config.head_dim);
    }
    matrix(prefix + "attn_output.weight", options.hidden, q_dim);
    vector(prefix + "ffn_norm.weight", options.hidden);
    matrix(prefix + "ffn_gate.weight", options.ffn, options.hidden);
    matrix(prefix + "ffn_up.weight", options.ffn, options.hidden);
    matrix(prefix + "ffn_down.weight", options.hidden, options.ffn);
    if (options.post_norms) {
      vector(prefix + "post_attention_norm.weight", options.hidden);
      vector(prefix + "post_ffw_norm.weight", options.hidden);
    }
  }
  return source;
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
