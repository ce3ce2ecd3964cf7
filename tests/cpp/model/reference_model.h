#ifndef GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_
#define GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/tiny_model.h"

// The model as its description reads, in double, with no cache and no
// cleverness: the oracle of the forward pass.

namespace gkv {

class ReferenceModel {
 public:
  using Row = std::vector<double>;

  // Requires: all tensors of `source` are F32.
  ReferenceModel(const ModelConfig& config, const MemorySource& source)
      : config_(config), source_(source) {}

  // Logits after every position, [tokens][vocab_size].
  std::vector<Row> Logits(const std::vector<int32_t>& tokens) const {
    std::vector<Row> x;
    const std::vector<float> embedding = source_.Floats("token_embd.weight");
    for (const int32_t token : tokens) {
      Row row(config_.hidden_size);
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = embedding[static_cast<size_t>(token) * row.size() + i] *
                 std::sqrt(static_cast<double>(row.size()));
      }
      x.push_back(row);
    }
    for (size_t layer = 0; layer < config_.num_layers; ++layer) {
      Attention(layer, x);
      FeedForward(layer, x);
    }
    const bool tied = !source_.tensors.contains("output.weight");
    for (Row& row : x) {
      row = Multiply(tied ? "token_embd.weight" : "output.weight",
                     Norm(row, "output_norm.weight"));
      Cap(config_.final_soft_cap, row);
    }
    return x;
  }

 private:
  static void Cap(double cap, Row& row) {
    if (cap == 0) return;
    for (double& value : row) value = cap * std::tanh(value / cap);
  }

  Row Norm(const Row& x, const std::string& name) const {
    const std::vector<float> weight = source_.Floats(name);
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale =
        1 / std::sqrt(sum / static_cast<double>(x.size()) +
                      static_cast<double>(config_.rms_epsilon));
    Row out(x.size());
    for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight[i];
    return out;
  }

  Row Multiply(const std::string& name, const Row& x) const {
    const MemorySource::Tensor& tensor = source_.tensors.at(name);
    const std::vector<float> weight = source_.Floats(name);
    Row out(tensor.rows, 0.0);
    for (size_t r = 0; r < tensor.rows; ++r) {
      for (size_t c = 0; c < tensor.cols; ++c) {
        out[r] += weight[r * tensor.cols + c] * x[c];
      }
    }
    return out;
  }

  // One head of a projected row, normed and rotated.
  Row Head(const Row& row, size_t head, size_t layer, size_t position,
           const std::string& norm) const {
    const size_t dim = config_.head_dim;
    Row x(row.begin() + static_cast<long>(head * dim),
          row.begin() + static_cast<long>((head + 1) * dim));
    if (config_.qk_norm) x = Norm(x, norm);
    const bool full = config_.layer_kinds[layer] == LayerKind::kFull;
    const double base =
        full ? config_.rope_base_full : config_.rope_base_sliding;
    const double factor = full ? config_.rope_factor_full : 1;
    Row out = x;
    for (size_t i = 0; i < dim / 2; ++i) {
      const double angle = static_cast<double>(position) / factor *
                           std::pow(base, -2.0 * static_cast<double>(i) /
                                              static_cast<double>(dim));
      const double c = std::cos(angle), s = std::sin(angle);
      out[i] = x[i] * c - x[i + dim / 2] * s;
      out[i + dim / 2] = x[i + dim / 2] * c + x[i] * s;
    }
    return out;
  }

  void Attention(size_t layer, std::vector<Row>& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    const size_t dim = config_.head_dim;
    const size_t group = config_.num_heads / config_.kv_heads;
    std::vector<Row> q, k, v;
    for (const Row& row : x) {
      const Row h = Norm(row, prefix + "attn_norm.weight");
      q.push_back(Multiply(prefix + "attn_q.weight", h));
      k.push_back(Multiply(prefix + "attn_k.weight", h));
      v.push_back(Multiply(prefix + "attn_v.weight", h));
    }
    std::vector<Row> keys;  // rotated, all heads of a position
    for (size_t p = 0; p < x.size(); ++p) {
      Row all;
      for (size_t head = 0; head < config_.kv_heads; ++head) {
        const Row one =
            Head(k[p], head, layer, p, prefix + "attn_k_norm.weight");
        all.insert(all.end(), one.begin(), one.end());
      }
      keys.push_back(all);
    }
    const bool full = config_.layer_kinds[layer] == LayerKind::kFull;
    for (size_t p = 0; p < x.size(); ++p) {
      const size_t begin = full || p + 1 < config_.sliding_window
                               ? 0
                               : p + 1 - config_.sliding_window;
      Row attended(config_.num_heads * dim, 0.0);
      for (size_t head = 0; head < config_.num_heads; ++head) {
        const Row query =
            Head(q[p], head, layer, p, prefix + "attn_q_norm.weight");
        const size_t at = head / group * dim;
        Row weights;
        for (size_t t = begin; t <= p; ++t) {
          double score = 0;
          for (size_t i = 0; i < dim; ++i) {
            score += query[i] * config_.query_scale * keys[t][at + i];
          }
          weights.push_back(score);
        }
        Cap(config_.attn_soft_cap, weights);
        const double max = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double& w : weights) sum += w = std::exp(w - max);
        for (size_t t = begin; t <= p; ++t) {
          for (size_t i = 0; i < dim; ++i) {
            attended[head * dim + i] += weights[t - begin] / sum * v[t][at + i];
          }
        }
      }
      Row out = Multiply(prefix + "attn_output.weight", attended);
      if (config_.post_norms) {
        out = Norm(out, prefix + "post_attention_norm.weight");
      }
      for (size_t i = 0; i < out.size(); ++i) x[p][i] += out[i];
    }
  }

  void FeedForward(size_t layer, std::vector<Row>& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    for (Row& row : x) {
      const Row h = Norm(row, prefix + "ffn_norm.weight");
      Row gate = Multiply(prefix + "ffn_gate.weight", h);
      const Row up = Multiply(prefix + "ffn_up.weight", h);
      for (size_t i = 0; i < gate.size(); ++i) {
        const double g = gate[i];
        const double inner = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
        gate[i] = 0.5 * g * (1 + std::tanh(inner)) * up[i];
      }
      Row out = Multiply(prefix + "ffn_down.weight", gate);
      if (config_.post_norms) out = Norm(out, prefix + "post_ffw_norm.weight");
      for (size_t i = 0; i < out.size(); ++i) row[i] += out[i];
    }
  }

  const ModelConfig& config_;
  const MemorySource& source_;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_
