#ifndef GEMMAKV_EXAMPLES_RANDOM_MODEL_H_
#define GEMMAKV_EXAMPLES_RANDOM_MODEL_H_

#include <gemmakv/gemma.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Weights from any source: this one makes them up, sized by what a small
// configuration asks for.
class RandomSource : public gkv::TensorSource {
 public:
  explicit RandomSource(const gkv::ModelConfig& c) {
    Add("token_embd.weight", c.vocab_size, c.hidden_size);
    Add("output_norm.weight", 1, c.hidden_size);
    for (size_t i = 0; i < c.num_layers(); ++i) {
      const gkv::LayerConfig& l = c.layers[i];
      const size_t q = l.num_heads * l.head_dim, kv = l.kv_heads * l.head_dim;
      const std::string layer = "blk." + std::to_string(i) + ".";
      for (const char* name : {"attn_norm", "ffn_norm", "post_attention_norm",
                               "post_ffw_norm"}) {
        Add(layer + name + ".weight", 1, c.hidden_size);
      }
      Add(layer + "attn_q_norm.weight", 1, l.head_dim);
      Add(layer + "attn_k_norm.weight", 1, l.head_dim);
      Add(layer + "attn_q.weight", q, c.hidden_size);
      Add(layer + "attn_k.weight", kv, c.hidden_size);
      Add(layer + "attn_v.weight", kv, c.hidden_size);
      Add(layer + "attn_output.weight", c.hidden_size, q);
      Add(layer + "ffn_gate.weight", l.ffn_dim, c.hidden_size);
      Add(layer + "ffn_up.weight", l.ffn_dim, c.hidden_size);
      Add(layer + "ffn_down.weight", c.hidden_size, l.ffn_dim);
    }
  }

  std::string Description() const override { return "random weights"; }
  std::vector<std::string> Names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  std::optional<gkv::TensorView> Find(std::string_view name) override {
    const auto it = tensors_.find(std::string(name));
    if (it == tensors_.end()) return std::nullopt;
    const Tensor& t = it->second;
    return gkv::TensorView{
        std::string(name), gkv::TensorType::kF32, t.rows, t.cols,
        reinterpret_cast<const uint8_t*>(t.values.data())};
  }

 private:
  struct Tensor {
    size_t rows, cols;
    std::vector<float> values;
  };
  void Add(const std::string& name, size_t rows, size_t cols) {
    Tensor tensor{rows, cols, std::vector<float>(rows * cols)};
    for (float& value : tensor.values) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<float>(state_ >> 40) * 0x1p-24f - 0.5f;
      if (rows == 1) value += 1.0f;  // norm weights lie around one
    }
    tensors_[name] = std::move(tensor);
  }

  uint64_t state_ = 1;
  std::map<std::string, Tensor> tensors_;
};

inline gkv::Gemma RandomModel() {
  gkv::ModelConfig config;
  config.hidden_size = 64;
  config.layers.assign(
      6, {.num_heads = 4, .kv_heads = 1, .head_dim = 32, .ffn_dim = 128});
  // What all models of the family have in common; the rest is this one's.
  gkv::ApplyFamily("gemma3", config);
  config.vocab_size = 256;
  config.context_length = 1024;
  for (gkv::LayerConfig& layer : config.layers) layer.window = 32;
  config.query_scale = 1 / std::sqrt(32.0);
  RandomSource source(config);
  return gkv::Gemma::FromTensors(config, source);
}

#endif  // GEMMAKV_EXAMPLES_RANDOM_MODEL_H_
