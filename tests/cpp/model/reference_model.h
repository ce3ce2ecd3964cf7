#ifndef GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_
#define GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "gemmakv/config.h"
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
    return LogitsOf(Hidden(tokens));
  }
  std::vector<Row> LogitsOf(std::vector<Row> x) const {
    const bool tied = !source_.tensors.contains("output.weight");
    for (Row& row : x) {
      row = Multiply(tied ? "token_embd.weight" : "output.weight", row);
      Cap(config_.final_soft_cap, row);
    }
    return x;
  }

  // The mean of all positions, behind the products for it; of length 1.
  Row Embedding(const std::vector<int32_t>& tokens) const {
    Row sum(config_.hidden_size);
    for (const Row& row : Hidden(tokens)) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
    }
    if (config_.dense_dim != 0) {
      sum = Multiply("dense_3.weight", Multiply("dense_2.weight", sum));
    }
    if (config_.embedding_dim != 0) {
      sum = Multiply("embedding_projection.weight", sum);
    }
    double squares = 0;
    for (const double value : sum) squares += value * value;
    for (double& value : sum) value /= std::sqrt(squares);
    return sum;
  }

  // Behind the last norm, [tokens][hidden_size].
  std::vector<Row> Hidden(const std::vector<int32_t>& tokens) const {
    std::vector<Row> x;
    const std::vector<float> embedding = source_.Floats("token_embd.weight");
    for (const int32_t token : tokens) {
      Row row(config_.hidden_size);
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = static_cast<double>(
                     embedding[static_cast<size_t>(token) * row.size() + i]) *
                 static_cast<double>(config_.embedding_scale);
      }
      x.push_back(row);
    }
    const std::vector<Row> vectors = PerLayerVectors(tokens, x);
    if (config_.altup_inputs != 0) return HiddenOfStreams(vectors, x);
    for (size_t layer = 0; layer < config_.num_layers(); ++layer) {
      if (config_.layers[layer].kind == LayerKind::kRecurrent) {
        Recurrence(layer, x);
      } else {
        Attention(layer, x);
      }
      FeedForward(layer, x);
      if (config_.ple_dim != 0) AddPerLayer(layer, vectors, x);
      if (!config_.layer_scales) continue;
      const float scale = source_.Floats("blk." + std::to_string(layer) +
                                         ".layer_output_scale.weight")[0];
      for (Row& row : x) {
        for (double& value : row) value *= static_cast<double>(scale);
      }
    }
    for (Row& row : x) row = Norm(row, "output_norm.weight");
    return x;
  }

 private:
  static void Cap(double cap, Row& row) {
    if (cap == 0) return;
    for (double& value : row) value = cap * std::tanh(value / cap);
  }

  static double Gelu(double x) {
    const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    return 0.5 * x * (1 + std::tanh(inner));
  }

  static double MeanSquare(const Row& x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    return sum / static_cast<double>(x.size());
  }

  // y, as large as x.
  static Row Matched(const Row& x, Row y) {
    const double factor =
        std::sqrt(MeanSquare(x) / std::max(MeanSquare(y), 1e-5));
    for (double& value : y) value *= factor;
    return y;
  }

  // AltUp (arXiv 2301.13310), as Gemma 3n has it: [streams] of a position.
  using Streams = std::vector<Row>;

  std::vector<Row> HiddenOfStreams(const std::vector<Row>& vectors,
                                   const std::vector<Row>& embedded) const {
    const size_t inputs = config_.altup_inputs;
    std::vector<Streams> all;
    for (const Row& x : embedded) {
      Streams streams = {x};
      for (size_t k = 1; k < inputs; ++k) {
        streams.push_back(Matched(
            x, Multiply("altup_proj." + std::to_string(k - 1) + ".weight", x)));
      }
      all.push_back(streams);
    }
    for (size_t layer = 0; layer < config_.num_layers(); ++layer) {
      StreamsLayer(layer, vectors, all);
    }
    std::vector<Row> out;
    for (const Streams& streams : all) {
      Row sum = streams[0];
      for (size_t k = 1; k < inputs; ++k) {
        const Row one = Matched(
            streams[0],
            Multiply("altup_unembd_proj." + std::to_string(k - 1) + ".weight",
                     streams[k]));
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
      }
      for (double& value : sum) value /= static_cast<double>(inputs);
      out.push_back(Norm(sum, "output_norm.weight"));
    }
    return out;
  }

  void StreamsLayer(size_t layer, const std::vector<Row>& vectors,
                    std::vector<Streams>& all) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    const size_t inputs = config_.altup_inputs;
    const size_t size = config_.hidden_size;
    std::vector<Row> active;
    for (Streams& streams : all) {
      const Row map = Coefficients(prefix + "altup_predict_coef.weight", prefix,
                                   streams[config_.altup_active]);
      const Streams old = streams;
      for (size_t j = 0; j < inputs; ++j) {
        for (size_t k = 0; k < inputs; ++k) {
          for (size_t i = 0; i < size; ++i) {
            streams[j][i] += map[j * inputs + k] * old[k][i];
          }
        }
      }
      active.push_back(streams[config_.altup_active]);
    }
    std::vector<Row> beside;
    for (const Row& row : active) {
      Row one = Norm(row, prefix + "attn_norm.weight");
      const Row product =
          Norm(Multiply(prefix + "laurel_r.weight",
                        Multiply(prefix + "laurel_l.weight", one)),
               prefix + "laurel_post_norm.weight");
      for (size_t i = 0; i < size; ++i) one[i] += product[i];
      beside.push_back(one);
    }
    Attention(layer, active);
    for (size_t p = 0; p < active.size(); ++p) {
      for (size_t i = 0; i < size; ++i) {
        active[p][i] = (active[p][i] + beside[p][i]) / std::sqrt(2.0);
      }
    }
    FeedForward(layer, active);
    for (size_t p = 0; p < all.size(); ++p) {
      Streams& streams = all[p];
      const Row coefs = Coefficients(prefix + "altup_correct_coef.weight",
                                     prefix, active[p]);
      const Row predicted = streams[config_.altup_active];
      for (size_t k = 0; k < inputs; ++k) {
        for (size_t i = 0; i < size; ++i) {
          streams[k][i] += (1 + coefs[k]) * (active[p][i] - predicted[i]);
        }
      }
      Row gated = streams[config_.altup_active];
      if (config_.altup_correct_scale) {
        const std::vector<float> scale =
            source_.Floats(prefix + "altup_correct_scale.weight");
        for (size_t i = 0; i < size; ++i) gated[i] *= scale[i];
      }
      const Row added = PerLayer(layer, vectors[p], gated);
      for (size_t k = 1; k < inputs; ++k) {
        for (size_t i = 0; i < size; ++i) streams[k][i] += added[i];
      }
    }
  }

  // What a matrix makes of the routes of x.
  Row Coefficients(const std::string& name, const std::string& prefix,
                   const Row& x) const {
    Row normed = Norm(x, prefix + "altup_router_norm.weight");
    for (double& value : normed) value /= static_cast<double>(x.size());
    Row routes = Multiply(prefix + "altup_router.weight", normed);
    for (double& value : routes) value = std::tanh(value);
    return Multiply(name, routes);
  }

  // Of a share of gates.
  static void KeepLargest(double cutoff, Row& gate) {
    if (!std::isfinite(cutoff)) return;
    const auto count = static_cast<double>(gate.size());
    double mean = 0, squares = 0;
    for (const double value : gate) mean += value / count;
    for (const double value : gate) squares += (value - mean) * (value - mean);
    const double least = mean + cutoff * std::sqrt(squares / count);
    for (double& value : gate) value = std::max(0.0, value - least);
  }

  static double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  static void AddTo(Row& row, const std::vector<float>& values) {
    for (size_t i = 0; i < row.size(); ++i) row[i] += values[i];
  }

  Row Norm(const Row& x, const std::string& name) const {
    return Norm(x, source_.Floats(name));
  }

  Row Norm(const Row& x, const std::vector<float>& weight) const {
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double scale =
        1 / std::sqrt(sum / static_cast<double>(x.size()) +
                      static_cast<double>(config_.rms_epsilon));
    Row out(x.size());
    for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight[i];
    return out;
  }

  // A product whose output has a bias in models with biases.
  Row Linear(const std::string& name, const Row& x) const {
    Row out = Multiply(name + ".weight", x);
    if (config_.biases) AddTo(out, source_.Floats(name + ".bias"));
    return out;
  }

  Row Multiply(const std::string& name, const Row& x) const {
    return MultiplyRows(name, 0, source_.tensors.at(name).rows, x);
  }

  Row MultiplyRows(const std::string& name, size_t begin, size_t rows,
                   const Row& x) const {
    const MemorySource::Tensor& tensor = source_.tensors.at(name);
    const std::vector<float> weight = source_.Floats(name);
    Row out(rows, 0.0);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < tensor.cols; ++c) {
        out[r] += weight[(begin + r) * tensor.cols + c] * x[c];
      }
    }
    return out;
  }

  // One head of a projected row, normed and rotated.
  Row Head(const Row& row, size_t head, size_t layer, size_t position,
           const std::string& norm) const {
    const LayerConfig& shape = config_.layers[layer];
    const size_t dim = shape.head_dim;
    Row x(row.begin() + static_cast<long>(head * dim),
          row.begin() + static_cast<long>((head + 1) * dim));
    if (config_.qk_norm) x = Norm(x, norm);
    const size_t half = shape.rope_dim / 2;
    Row out = x;
    for (size_t i = 0; i < half - shape.still_pairs; ++i) {
      const double angle =
          static_cast<double>(position) / shape.rope_factor *
          std::pow(shape.rope_base,
                   -static_cast<double>(i) / static_cast<double>(half));
      const double c = std::cos(angle), s = std::sin(angle);
      out[i] = x[i] * c - x[i + half] * s;
      out[i + half] = x[i + half] * c + x[i] * s;
    }
    return out;
  }

  // All value heads of a position, from what the layer reads and its keys as
  // they were projected.
  Row Values(size_t layer, const Row& input, const Row& keys) const {
    const LayerConfig& shape = config_.layers[layer];
    const bool same = config_.keys_are_values && shape.kind == LayerKind::kFull;
    const Row v =
        same ? keys
             : Multiply("blk." + std::to_string(layer) + ".attn_v.weight",
                        input);
    if (!config_.value_norm) return v;
    Row all;
    for (size_t head = 0; head < shape.kv_heads; ++head) {
      const auto begin = v.begin() + static_cast<long>(head * shape.head_dim);
      const Row one =
          Norm(Row(begin, begin + static_cast<long>(shape.head_dim)),
               std::vector<float>(shape.head_dim, 1.0f));
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  void Attention(size_t layer, std::vector<Row>& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    const LayerConfig& shape = config_.layers[layer];
    const size_t dim = shape.head_dim;
    const size_t group = shape.num_heads / shape.kv_heads;
    std::vector<Row> q;
    KeysValues own;
    for (size_t p = 0; p < x.size(); ++p) {
      const Row h = Norm(x[p], prefix + "attn_norm.weight");
      q.push_back(Multiply(prefix + "attn_q.weight", h));
      if (shape.shares_kv) continue;
      const Row k = Multiply(prefix + "attn_k.weight", h);
      Row all;
      for (size_t head = 0; head < shape.kv_heads; ++head) {
        const Row one = Head(k, head, layer, p, prefix + "attn_k_norm.weight");
        all.insert(all.end(), one.begin(), one.end());
      }
      own.keys.push_back(all);
      own.values.push_back(Values(layer, h, k));
    }
    if (!shape.shares_kv) stored_[layer] = own;
    const auto& [keys, v] = stored_.at(shape.shares_kv.value_or(layer));
    const bool full = shape.kind == LayerKind::kFull;
    for (size_t p = 0; p < x.size(); ++p) {
      const size_t begin =
          full || p + 1 < shape.window ? 0 : p + 1 - shape.window;
      size_t end = p + 1;
      if (config_.bidirectional) {
        end = full ? x.size() : std::min(x.size(), p + shape.window);
      }
      Row attended(shape.num_heads * dim, 0.0);
      for (size_t head = 0; head < shape.num_heads; ++head) {
        const Row query =
            Head(q[p], head, layer, p, prefix + "attn_q_norm.weight");
        const size_t at = head / group * dim;
        Row weights;
        for (size_t t = begin; t < end; ++t) {
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
        for (size_t t = begin; t < end; ++t) {
          for (size_t i = 0; i < dim; ++i) {
            attended[head * dim + i] += weights[t - begin] / sum * v[t][at + i];
          }
        }
      }
      Row out = Linear(prefix + "attn_output", attended);
      if (config_.post_norms) {
        out = Norm(out, prefix + "post_attention_norm.weight");
      }
      for (size_t i = 0; i < out.size(); ++i) x[p][i] += out[i];
    }
  }

  // Griffin's recurrent block (arXiv 2402.19427, sections 2.3 and 2.4).
  void Recurrence(size_t layer, std::vector<Row>& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    const size_t width = config_.lru_width;
    const std::vector<float> param = source_.Floats(prefix + "rec_a_param");
    std::vector<Row> inputs;  // of the convolution
    Row state(width, 0.0);
    for (size_t p = 0; p < x.size(); ++p) {
      const Row h = Norm(x[p], prefix + "attn_norm.weight");
      const Row y = Linear(prefix + "rec_y", h);
      inputs.push_back(Linear(prefix + "rec_x", h));
      const Row u = Convolved(prefix, inputs);
      const Row input_gate = Gate(prefix + "rec_input_gate", u);
      const Row a_gate = Gate(prefix + "rec_a_gate", u);
      Row gated(width);
      for (size_t c = 0; c < width; ++c) {
        const double softplus =
            std::log1p(std::exp(static_cast<double>(param[c])));
        const double a = std::exp(-8 * softplus * a_gate[c]);
        state[c] =
            p == 0 ? input_gate[c] * u[c]
                   : a * state[c] + std::sqrt(1 - a * a) * input_gate[c] * u[c];
        gated[c] = Gelu(y[c]) * state[c];
      }
      Row out = Linear(prefix + "rec_output", gated);
      if (config_.post_norms) {
        out = Norm(out, prefix + "post_attention_norm.weight");
      }
      for (size_t i = 0; i < out.size(); ++i) x[p][i] += out[i];
    }
  }

  // The depthwise convolution's output at the last of these positions. The last
  // tap is that of the position itself.
  Row Convolved(const std::string& prefix,
                const std::vector<Row>& inputs) const {
    const std::vector<float> taps = source_.Floats(prefix + "rec_conv.weight");
    const size_t width = config_.conv_width;
    Row out(config_.lru_width, 0.0);
    AddTo(out, source_.Floats(prefix + "rec_conv.bias"));
    for (size_t back = 0; back < std::min(width, inputs.size()); ++back) {
      const Row& input = inputs[inputs.size() - 1 - back];
      for (size_t c = 0; c < out.size(); ++c) {
        out[c] += taps[c * width + width - 1 - back] * input[c];
      }
    }
    return out;
  }

  // Every block of channels has a matrix of its own.
  Row Gate(const std::string& name, const Row& u) const {
    const std::vector<float> weight = source_.Floats(name + ".weight");
    const size_t block = config_.lru_width / config_.lru_blocks;
    Row out(u.size(), 0.0);
    AddTo(out, source_.Floats(name + ".bias"));
    for (size_t r = 0; r < u.size(); ++r) {
      for (size_t c = 0; c < block; ++c) {
        out[r] += weight[r * block + c] * u[r / block * block + c];
      }
    }
    for (double& value : out) value = Sigmoid(value);
    return out;
  }

  void FeedForward(size_t layer, std::vector<Row>& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    for (Row& row : x) {
      const Row h = Norm(row, prefix + "ffn_norm.weight");
      Row gate = Linear(prefix + "ffn_gate", h);
      KeepLargest(config_.layers[layer].sparsity_cutoff, gate);
      const Row up = Linear(prefix + "ffn_up", h);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = Gelu(gate[i]) * up[i];
      Row out = Linear(prefix + "ffn_down", gate);
      if (config_.num_experts != 0) {
        out = Norm(out, prefix + "post_ffw_norm_1.weight");
        const Row all = Norm(Experts(prefix, row),
                             prefix + "post_ffw_norm_2.weight");
        for (size_t i = 0; i < out.size(); ++i) out[i] += all[i];
      }
      if (config_.post_norms) out = Norm(out, prefix + "post_ffw_norm.weight");
      for (size_t i = 0; i < out.size(); ++i) row[i] += out[i];
    }
  }

  // The weighted sum of those that the router chooses for a row of the residual
  // stream.
  Row Experts(const std::string& prefix, const Row& x) const {
    const size_t count = config_.num_experts, width = config_.expert_ffn_dim;
    Row routed = Norm(x, prefix + "ffn_gate_inp.scale");
    for (double& value : routed) {
      value /= std::sqrt(static_cast<double>(config_.hidden_size));
    }
    Row shares = Multiply(prefix + "ffn_gate_inp.weight", routed);
    const double largest = *std::max_element(shares.begin(), shares.end());
    for (double& share : shares) share = std::exp(share - largest);
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return shares[a] > shares[b];
    });
    order.resize(config_.experts_used);
    double sum = 0;
    for (const size_t e : order) sum += shares[e];
    const std::vector<float> scales =
        source_.Floats(prefix + "ffn_down_exps.scale");
    const bool split =
        source_.tensors.contains(prefix + "ffn_gate_exps.weight");
    const Row input = Norm(x, prefix + "pre_ffw_norm_2.weight");
    Row out(x.size(), 0.0);
    for (const size_t e : order) {
      const auto rows = [&](const char* name, size_t begin, size_t size,
                            const Row& by) {
        return MultiplyRows(prefix + name, begin, size, by);
      };
      Row gate = split ? rows("ffn_gate_exps.weight", e * width, width, input)
                       : rows("ffn_gate_up_exps.weight", 2 * e * width, width,
                              input);
      const Row up =
          split ? rows("ffn_up_exps.weight", e * width, width, input)
                : rows("ffn_gate_up_exps.weight", (2 * e + 1) * width, width,
                       input);
      for (size_t i = 0; i < width; ++i) gate[i] = Gelu(gate[i]) * up[i];
      const Row down =
          rows("ffn_down_exps.weight", e * x.size(), x.size(), gate);
      for (size_t i = 0; i < x.size(); ++i) {
        out[i] += shares[e] / sum * static_cast<double>(scales[e]) * down[i];
      }
    }
    return out;
  }

  // Of every position, those of all layers behind one another; from its token
  // and its embedding.
  std::vector<Row> PerLayerVectors(const std::vector<int32_t>& tokens,
                                   const std::vector<Row>& x) const {
    std::vector<Row> all;
    if (config_.ple_dim == 0) return all;
    const size_t dim = config_.ple_dim, width = dim * config_.num_layers();
    std::vector<float> table;
    if (config_.ple_vocab != 0) {
      table = source_.Floats("per_layer_token_embd.weight");
    }
    for (size_t p = 0; p < x.size(); ++p) {
      Row projected = Multiply("per_layer_model_proj.weight", x[p]);
      Row vectors;
      for (size_t begin = 0; begin < width; begin += dim) {
        Row one(dim);
        for (size_t i = 0; i < dim; ++i) {
          one[i] = projected[begin + i] /
                   std::sqrt(static_cast<double>(config_.hidden_size));
        }
        one = Norm(one, "per_layer_proj_norm.weight");
        if (table.empty()) {
          vectors.insert(vectors.end(), one.begin(), one.end());
          continue;
        }
        for (size_t i = 0; i < dim; ++i) {
          const auto token = static_cast<size_t>(tokens[p]);
          const size_t row = token < config_.ple_vocab ? token : 0;
          const double stored = table[row * width + begin + i];
          vectors.push_back(
              (one[i] + stored * std::sqrt(static_cast<double>(dim))) /
              std::sqrt(2.0));
        }
      }
      all.push_back(vectors);
    }
    return all;
  }

  void AddPerLayer(size_t layer, const std::vector<Row>& vectors,
                   std::vector<Row>& x) const {
    for (size_t p = 0; p < x.size(); ++p) {
      const Row out = PerLayer(layer, vectors[p], x[p]);
      for (size_t i = 0; i < out.size(); ++i) x[p][i] += out[i];
    }
  }

  Row PerLayer(size_t layer, const Row& vectors, const Row& x) const {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    Row gate = Multiply(prefix + "inp_gate.weight", x);
    for (size_t i = 0; i < gate.size(); ++i) {
      gate[i] = Gelu(gate[i]) * vectors[layer * gate.size() + i];
    }
    return Norm(Multiply(prefix + "proj.weight", gate),
                prefix + "post_norm.weight");
  }

  struct KeysValues {
    std::vector<Row> keys;  // rotated, all heads of a position
    std::vector<Row> values;
  };

  const ModelConfig& config_;
  const MemorySource& source_;
  mutable std::map<size_t, KeysValues> stored_;  // of the layers that own some
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_CPP_MODEL_REFERENCE_MODEL_H_
