// One step of a model, written in the order in which it is described:
// embedding, then per layer attention or a recurrence, and feed-forward, then
// the head. Work is cut into independent tasks over rows, weight groups,
// attention tiles or blocks of channels; no result depends on the cut.

#include "model/forward.h"

#include <algorithm>

#include "base/aligned_buffer.h"
#include "model/activations.h"
#include "model/attention_plan.h"
#include "model/output_head.h"
#include "model/recurrent_block.h"
#include "model/step_work.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/kv_strip.h"
#include "ops/rope.h"

namespace gkv {
namespace {

struct RowInfo {
  size_t slice;
  size_t position;
  int32_t token;
};

// Rotations of the step's positions, for layers that rotate alike.
struct Rope {
  double base, factor;
  size_t dim;
  RopeTable table;
  AlignedBuffer<float> cos, sin;  // [rows, dim / 2]
};

}  // namespace

struct ForwardPass::Buffers {
  std::vector<RowInfo> rows;
  AlignedBuffer<float> x;  // [rows, hidden_size], the residual stream
  std::vector<Rope> ropes;      // all different ones
  std::vector<size_t> rope_of;  // [layers]; unused where layers are recurrent
  Activations mixer_input, ffn_input;                     // normalized residual
  AlignedBuffer<float> q, k, v;  // [rows, heads * head_dim]
  Activations attended;          // [rows, num_heads * head_dim]
  RecurrentBlock recurrent;
  AlignedBuffer<float> projected;  // [rows, hidden_size]
  AlignedBuffer<float> gate, up;   // [rows, ffn_dim]
  Activations activated;           // [rows, ffn_dim]
  AttentionScratch attention;
};

class ForwardPass::Run {
 public:
  Run(const Model& model, ThreadPool& pool, Buffers& buffers, OutputHead& head,
      std::span<const SequenceSlice> slices)
      : model_(model),
        config_(model.config),
        work_(pool),
        b_(buffers),
        head_(head),
        slices_(slices) {
    b_.rows.clear();
    for (size_t s = 0; s < slices.size(); ++s) {
      for (size_t i = 0; i < slices[s].tokens.size(); ++i) {
        b_.rows.push_back({s, slices[s].view->begin + i, slices[s].tokens[i]});
      }
    }
    num_rows_ = b_.rows.size();
    Allocate();
  }

  void Step() {
    Embed();
    for (size_t layer = 0; layer < config_.num_layers(); ++layer) {
      TemporalMixing(layer);
      FeedForward(layer);
    }
    Head();
  }

 private:
  size_t hidden() const { return config_.hidden_size; }
  const LayerConfig& shape() const { return config_.layers[0]; }
  size_t q_dim() const { return shape().num_heads * shape().head_dim; }
  size_t kv_dim() const { return shape().kv_heads * shape().head_dim; }
  float* x(size_t row) { return b_.x.data() + row * hidden(); }
  float* projected(size_t row) { return b_.projected.data() + row * hidden(); }

  void Allocate() {
    b_.x.EnsureSize(num_rows_ * hidden());
    size_t positions = 0;
    for (const SequenceSlice& slice : slices_) {
      positions = std::max(positions, slice.view->end);
    }
    for (Rope& rope : b_.ropes) {
      rope.table.Reserve(positions);
      rope.cos.EnsureSize(num_rows_ * rope.dim / 2);
      rope.sin.EnsureSize(num_rows_ * rope.dim / 2);
    }
    b_.mixer_input.Resize(num_rows_, hidden());
    b_.ffn_input.Resize(num_rows_, hidden());
    b_.q.EnsureSize(num_rows_ * q_dim());
    b_.k.EnsureSize(num_rows_ * kv_dim());
    b_.v.EnsureSize(num_rows_ * kv_dim());
    b_.attended.Resize(num_rows_, q_dim());
    b_.projected.EnsureSize(num_rows_ * hidden());
    b_.gate.EnsureSize(num_rows_ * shape().ffn_dim);
    b_.up.EnsureSize(num_rows_ * shape().ffn_dim);
    b_.activated.Resize(num_rows_, shape().ffn_dim);
    b_.attention.Plan(config_, slices_, work_.pool().num_threads());
    if (config_.lru_width != 0) b_.recurrent.Resize(config_, num_rows_);
  }

  void Embed() {
    const PackedView embedding = model_.weights.embedding.view();
    work_.ForRows(num_rows_, [&](size_t row) {
      const RowInfo& info = b_.rows[row];
      UnpackRow(embedding, static_cast<size_t>(info.token), x(row));
      Scale(config_.embedding_scale, hidden(), x(row));
      for (Rope& rope : b_.ropes) {
        const size_t at = row * rope.dim / 2;
        rope.table.CosSin(info.position, rope.cos.data() + at,
                          rope.sin.data() + at);
      }
    });
  }

  // What mixes positions: attention or a recurrence.
  void TemporalMixing(size_t layer) {
    const LayerWeights& weights = model_.weights.layers[layer];
    work_.ForRows(num_rows_, [&](size_t row) {
      RmsNorm(x(row), weights.attn_norm.data(), config_.rms_epsilon, hidden(),
              b_.mixer_input.row(row));
      b_.mixer_input.Quantize(row);
    });
    Activations& mixed =
        weights.recurrent ? Recurrence(layer) : Attention(layer);
    work_.ForRows(num_rows_, [&](size_t row) { mixed.Quantize(row); });
    work_.MatMuls({{&weights.o, &mixed, b_.projected.data()}});
    work_.ForRows(num_rows_, [&](size_t row) {
      AddToResidual(weights.o_bias, weights.post_attn_norm, row);
      RmsNorm(x(row), weights.ffn_norm.data(), config_.rms_epsilon, hidden(),
              b_.ffn_input.row(row));
      b_.ffn_input.Quantize(row);
    });
  }

  Activations& Recurrence(size_t layer) {
    const RecurrentWeights& weights = *model_.weights.layers[layer].recurrent;
    work_.MatMuls({{&weights.x, &b_.mixer_input, b_.recurrent.x()},
                   {&weights.y, &b_.mixer_input, b_.recurrent.y()}});
    b_.recurrent.Mix(config_, weights, layer, slices_, work_.pool());
    return b_.recurrent.output();
  }

  Activations& Attention(size_t layer) {
    const LayerWeights& weights = model_.weights.layers[layer];
    work_.MatMuls({{&weights.q, &b_.mixer_input, b_.q.data()},
                   {&weights.k, &b_.mixer_input, b_.k.data()},
                   {&weights.v, &b_.mixer_input, b_.v.data()}});
    // All keys and values of the step are stored before any row attends.
    work_.ForRows(num_rows_, [&](size_t row) { QueryKeyValue(layer, row); });
    b_.attention.Attend(config_, slices_, layer, b_.q.data(),
                        b_.attended.floats.data(), work_.pool());
    return b_.attended;
  }

  // Norms and rotates the row's query and key heads and stores key and value.
  void QueryKeyValue(size_t layer, size_t row) {
    const LayerWeights& weights = model_.weights.layers[layer];
    const size_t head_dim = shape().head_dim;
    const RowInfo& info = b_.rows[row];
    const KvLayout& layout = *slices_[info.slice].layout;
    const Rope& rope = b_.ropes[b_.rope_of[layer]];
    const size_t rope_dim = rope.dim;
    const float* cos = rope.cos.data() + row * rope_dim / 2;
    const float* sin = rope.sin.data() + row * rope_dim / 2;
    for (size_t head = 0; head < shape().num_heads; ++head) {
      float* q = b_.q.data() + row * q_dim() + head * head_dim;
      if (config_.qk_norm) {
        RmsNorm(q, weights.q_norm.data(), config_.rms_epsilon, head_dim, q);
      }
      Rotate(cos, sin, rope_dim, q);
      Scale(static_cast<float>(config_.query_scale), head_dim, q);
    }
    const KvStepView::Group& table =
        slices_[info.slice].view->groups[layout.group_of(layer)];
    if (info.position < table.write_begin) return;
    const size_t block_tokens = layout.block_tokens();
    const size_t block = info.position / block_tokens - table.first_block;
    const size_t index = info.position % block_tokens;
    for (size_t head = 0; head < shape().kv_heads; ++head) {
      float* k = b_.k.data() + row * kv_dim() + head * head_dim;
      const float* v = b_.v.data() + row * kv_dim() + head * head_dim;
      if (config_.qk_norm) {
        RmsNorm(k, weights.k_norm.data(), config_.rms_epsilon, head_dim, k);
      }
      Rotate(cos, sin, rope_dim, k);
      StoreKey(layout.dtype(), k, head_dim, index, block_tokens,
               table.blocks[block] + layout.key_offset(layer, head));
      StoreValue(layout.dtype(), v, head_dim, index, block_tokens,
                 table.blocks[block] + layout.value_offset(layer, head));
    }
  }

  void FeedForward(size_t layer) {
    const LayerWeights& weights = model_.weights.layers[layer];
    const size_t ffn = shape().ffn_dim;
    work_.MatMuls({{&weights.gate, &b_.ffn_input, b_.gate.data()},
                   {&weights.up, &b_.ffn_input, b_.up.data()}});
    work_.ForRows(num_rows_, [&](size_t row) {
      float* const gate = b_.gate.data() + row * ffn;
      float* const up = b_.up.data() + row * ffn;
      AddBias(weights.gate_bias, gate);
      AddBias(weights.up_bias, up);
      GeluMul(gate, up, ffn, b_.activated.row(row));
      b_.activated.Quantize(row);
    });
    work_.MatMuls({{&weights.down, &b_.activated, b_.projected.data()}});
    work_.ForRows(num_rows_, [&](size_t row) {
      AddToResidual(weights.down_bias, weights.post_ffn_norm, row);
    });
  }

  static void AddBias(const FloatVector& bias, float* row) {
    if (bias.size() != 0) Add(bias.data(), bias.size(), row);
  }

  void AddToResidual(const FloatVector& bias, const FloatVector& post_norm,
                     size_t row) {
    AddBias(bias, projected(row));
    if (config_.post_norms) {
      AddRmsNorm(projected(row), post_norm.data(), config_.rms_epsilon,
                 hidden(), x(row));
    } else {
      Add(projected(row), hidden(), x(row));
    }
  }

  void Head() {
    std::vector<OutputHead::Row> rows;
    size_t end = 0;
    for (const SequenceSlice& slice : slices_) {
      end += slice.tokens.size();
      const RowOutput& output = slice.output;
      for (size_t i = 0; i < output.rows; ++i) {
        const float* row = x(end - output.rows + i);
        if (output.kind == RowOutput::kHidden) {
          RmsNorm(row, model_.weights.final_norm.data(), config_.rms_epsilon,
                  hidden(), output.data + i * hidden());
        } else {
          rows.push_back({row, output.data + i * config_.vocab_size,
                          output.kind == RowOutput::kLargest});
        }
      }
    }
    head_.Compute(rows);
  }

  const Model& model_;
  const ModelConfig& config_;
  const StepWork work_;
  Buffers& b_;
  OutputHead& head_;
  std::span<const SequenceSlice> slices_;
  size_t num_rows_ = 0;
};

ForwardPass::ForwardPass(const Model& model, ThreadPool& pool)
    : model_(model),
      pool_(pool),
      buffers_(std::make_unique<Buffers>()),
      head_(std::make_unique<OutputHead>(model.config, model.weights, pool)) {
  std::vector<Rope>& ropes = buffers_->ropes;
  for (const LayerConfig& layer : model.config.layers) {
    size_t at = 0;
    if (layer.kind != LayerKind::kRecurrent) {
      while (at < ropes.size() && !(ropes[at].base == layer.rope_base &&
                                    ropes[at].factor == layer.rope_factor &&
                                    ropes[at].dim == layer.rope_dim)) {
        ++at;
      }
      if (at == ropes.size()) {
        ropes.push_back(
            {layer.rope_base, layer.rope_factor, layer.rope_dim,
             RopeTable(layer.rope_base, layer.rope_factor, layer.rope_dim),
             {}, {}});
      }
    }
    buffers_->rope_of.push_back(at);
  }
}

ForwardPass::~ForwardPass() = default;

void ForwardPass::Step(std::span<const SequenceSlice> slices) {
  Run(model_, pool_, *buffers_, *head_, slices).Step();
}

}  // namespace gkv
