// One step of a transformer, written in the order in which the model is
// described: embedding, then per layer attention and feed-forward, then the
// head. Work is cut into independent tasks over rows, weight groups or
// attention tiles; no result depends on the cut.

#include "model/forward.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/aligned_buffer.h"
#include "model/activations.h"
#include "model/attention_plan.h"
#include "model/output_head.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/kv_strip.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

// Row-wise work on so few rows costs less than waking another thread.
constexpr size_t kSerialRows = 4;
constexpr size_t kRowsPerTask = 8;
// Weight groups are handed out in a few portions per thread, so that a thread
// that is held up by the system does not hold up the others; a portion is long
// enough for the kernels to prefetch within it.
constexpr size_t kMinGroupsPerTask = 16;
constexpr size_t kMaxPortionsPerThread = 16;

struct MatMulJob {
  const PackedMatrix* weights;
  Activations* input;
  float* out;  // [input->planes, rows, weights->rows]
};

struct RowInfo {
  size_t slice;
  size_t position;
  int32_t token;
};

}  // namespace

struct ForwardPass::Buffers {
  std::vector<RowInfo> rows;
  AlignedBuffer<float> x;  // [rows, hidden_size], the residual stream
  AlignedBuffer<float> cos[kNumGroups], sin[kNumGroups];  // [rows, head_dim/2]
  Activations attn_input, ffn_input;                      // normalized residual
  AlignedBuffer<float> q, k, v;      // [rows, heads * head_dim]
  Activations attended;              // [rows, num_heads * head_dim]
  AlignedBuffer<float> projected;    // [rows, hidden_size]
  AlignedBuffer<float> gate, up;     // [rows, ffn_dim]
  Activations activated;             // [rows, ffn_dim]
  AttentionScratch attention;
};

class ForwardPass::Run {
 public:
  Run(const Model& model, ThreadPool& pool, Buffers& buffers,
      OutputHead& head, std::span<const SequenceSlice> slices)
      : model_(model),
        config_(model.config),
        pool_(pool),
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

  void Step(float* logits) {
    Embed();
    for (size_t layer = 0; layer < config_.num_layers; ++layer) {
      Attention(layer);
      FeedForward(layer);
    }
    Head(logits);
  }

 private:
  size_t hidden() const { return config_.hidden_size; }
  size_t q_dim() const { return config_.num_heads * config_.head_dim; }
  size_t kv_dim() const { return config_.kv_heads * config_.head_dim; }
  float* x(size_t row) { return b_.x.data() + row * hidden(); }
  float* projected(size_t row) { return b_.projected.data() + row * hidden(); }

  void Allocate() {
    b_.x.EnsureSize(num_rows_ * hidden());
    for (size_t g = 0; g < kNumGroups; ++g) {
      b_.cos[g].EnsureSize(num_rows_ * config_.head_dim / 2);
      b_.sin[g].EnsureSize(num_rows_ * config_.head_dim / 2);
    }
    b_.attn_input.Resize(num_rows_, hidden());
    b_.ffn_input.Resize(num_rows_, hidden());
    b_.q.EnsureSize(num_rows_ * q_dim());
    b_.k.EnsureSize(num_rows_ * kv_dim());
    b_.v.EnsureSize(num_rows_ * kv_dim());
    b_.attended.Resize(num_rows_, q_dim());
    b_.projected.EnsureSize(num_rows_ * hidden());
    b_.gate.EnsureSize(num_rows_ * config_.ffn_dim);
    b_.up.EnsureSize(num_rows_ * config_.ffn_dim);
    b_.activated.Resize(num_rows_, config_.ffn_dim);
    b_.attention.Plan(config_, slices_, pool_.num_threads());
  }

  // fn(row) for every row, in parallel when there are enough of them.
  template <typename Fn>
  void ForRows(size_t rows, const Fn& fn) {
    if (rows <= kSerialRows) {
      for (size_t row = 0; row < rows; ++row) fn(row);
      return;
    }
    const size_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
    pool_.Run(tasks, [&](size_t task, size_t) {
      const size_t end = std::min(rows, (task + 1) * kRowsPerTask);
      for (size_t row = task * kRowsPerTask; row < end; ++row) fn(row);
    });
  }

  // Several products as one parallel loop.
  void MatMuls(std::initializer_list<MatMulJob> jobs) {
    size_t total_groups = 0;
    for (const MatMulJob& job : jobs) {
      total_groups += NumGroups(job.weights->rows);
    }
    const size_t threads = pool_.num_threads();
    const size_t portions = std::clamp<size_t>(
        total_groups / (threads * kMinGroupsPerTask), 1, kMaxPortionsPerThread);
    // Kernels take groups in pairs.
    const size_t share =
        (total_groups + threads * portions - 1) / (threads * portions);
    const size_t per_task = (share + 1) / 2 * 2;
    const size_t tasks = (total_groups + per_task - 1) / per_task;
    pool_.Run(tasks, [&](size_t task, size_t) {
      size_t begin = task * per_task;
      size_t end = std::min(total_groups, begin + per_task);
      for (const MatMulJob& job : jobs) {
        const size_t groups = NumGroups(job.weights->rows);
        if (begin < groups && begin < end) {
          MatMul(job.weights->view(), job.input->input(job.weights->type),
                 begin, std::min(end, groups), job.out, job.weights->rows);
        }
        begin = begin > groups ? begin - groups : 0;
        end = end > groups ? end - groups : 0;
      }
    });
  }

  void Embed() {
    const PackedView embedding = model_.weights.embedding.view();
    const size_t half = config_.head_dim / 2;
    ForRows(num_rows_, [&](size_t row) {
      const RowInfo& info = b_.rows[row];
      UnpackRow(embedding, static_cast<size_t>(info.token), x(row));
      Scale(config_.embedding_scale, hidden(), x(row));
      model_.rope_full->CosSin(info.position, b_.cos[0].data() + row * half,
                               b_.sin[0].data() + row * half);
      if (model_.rope_sliding) {
        model_.rope_sliding->CosSin(info.position,
                                    b_.cos[1].data() + row * half,
                                    b_.sin[1].data() + row * half);
      }
    });
  }

  void Attention(size_t layer) {
    const LayerWeights& weights = model_.weights.layers[layer];
    ForRows(num_rows_, [&](size_t row) {
      RmsNorm(x(row), weights.attn_norm.data(), config_.rms_epsilon, hidden(),
              b_.attn_input.row(row));
      b_.attn_input.Quantize(row);
    });
    MatMuls({{&weights.q, &b_.attn_input, b_.q.data()},
             {&weights.k, &b_.attn_input, b_.k.data()},
             {&weights.v, &b_.attn_input, b_.v.data()}});
    // All keys and values of the step are stored before any row attends.
    ForRows(num_rows_, [&](size_t row) { QueryKeyValue(layer, row); });
    b_.attention.Attend(config_, slices_, layer, b_.q.data(),
                        b_.attended.floats.data(), pool_);
    ForRows(num_rows_, [&](size_t row) { b_.attended.Quantize(row); });
    MatMuls({{&weights.o, &b_.attended, b_.projected.data()}});
    ForRows(num_rows_, [&](size_t row) {
      AddToResidual(weights.post_attn_norm, row);
      RmsNorm(x(row), weights.ffn_norm.data(), config_.rms_epsilon, hidden(),
              b_.ffn_input.row(row));
      b_.ffn_input.Quantize(row);
    });
  }

  // Norms and rotates the row's query and key heads and stores key and value.
  void QueryKeyValue(size_t layer, size_t row) {
    const LayerWeights& weights = model_.weights.layers[layer];
    const size_t head_dim = config_.head_dim;
    const RowInfo& info = b_.rows[row];
    const KvLayout& layout = *slices_[info.slice].layout;
    const size_t group = static_cast<size_t>(layout.group(layer));
    const float* cos = b_.cos[group].data() + row * head_dim / 2;
    const float* sin = b_.sin[group].data() + row * head_dim / 2;
    for (size_t head = 0; head < config_.num_heads; ++head) {
      float* q = b_.q.data() + row * q_dim() + head * head_dim;
      if (config_.qk_norm) {
        RmsNorm(q, weights.q_norm.data(), config_.rms_epsilon, head_dim, q);
      }
      Rotate(cos, sin, head_dim, q);
      Scale(static_cast<float>(config_.query_scale), head_dim, q);
    }
    const KvStepView::Group& table = slices_[info.slice].view->groups[group];
    if (info.position < table.write_begin) return;
    const size_t block_tokens = layout.block_tokens();
    const size_t block = info.position / block_tokens - table.first_block;
    const size_t index = info.position % block_tokens;
    for (size_t head = 0; head < config_.kv_heads; ++head) {
      float* k = b_.k.data() + row * kv_dim() + head * head_dim;
      const float* v = b_.v.data() + row * kv_dim() + head * head_dim;
      if (config_.qk_norm) {
        RmsNorm(k, weights.k_norm.data(), config_.rms_epsilon, head_dim, k);
      }
      Rotate(cos, sin, head_dim, k);
      StoreKey(layout.dtype(), k, head_dim, index, block_tokens,
               table.blocks[block] + layout.key_offset(layer, head));
      StoreValue(layout.dtype(), v, head_dim, index, block_tokens,
                 table.blocks[block] + layout.value_offset(layer, head));
    }
  }

  void FeedForward(size_t layer) {
    const LayerWeights& weights = model_.weights.layers[layer];
    const size_t ffn = config_.ffn_dim;
    MatMuls({{&weights.gate, &b_.ffn_input, b_.gate.data()},
             {&weights.up, &b_.ffn_input, b_.up.data()}});
    ForRows(num_rows_, [&](size_t row) {
      GeluMul(b_.gate.data() + row * ffn, b_.up.data() + row * ffn, ffn,
              b_.activated.row(row));
      b_.activated.Quantize(row);
    });
    MatMuls({{&weights.down, &b_.activated, b_.projected.data()}});
    ForRows(num_rows_,
            [&](size_t row) { AddToResidual(weights.post_ffn_norm, row); });
  }

  void AddToResidual(const FloatVector& post_norm, size_t row) {
    if (config_.post_norms) {
      AddRmsNorm(projected(row), post_norm.data(), config_.rms_epsilon,
                 hidden(), x(row));
    } else {
      Add(projected(row), hidden(), x(row));
    }
  }

  void Head(float* logits) {
    std::vector<OutputHead::Row> rows;
    size_t end = 0;
    for (const SequenceSlice& slice : slices_) {
      end += slice.tokens.size();
      for (size_t i = slice.logits_rows; i > 0; --i) {
        rows.push_back({x(end - i), logits, slice.argmax_only});
        logits += config_.vocab_size;
      }
    }
    head_.Compute(rows);
  }

  const Model& model_;
  const ModelConfig& config_;
  ThreadPool& pool_;
  Buffers& b_;
  OutputHead& head_;
  std::span<const SequenceSlice> slices_;
  size_t num_rows_ = 0;
};

Model::Model(ModelConfig config_in, Weights weights_in)
    : config(std::move(config_in)), weights(std::move(weights_in)) {
  rope_full = std::make_unique<RopeTable>(
      config.rope_base_full, config.rope_factor_full, config.head_dim,
      config.context_length);
  if (config.sliding_window > 0) {
    rope_sliding = std::make_unique<RopeTable>(
        config.rope_base_sliding, 1.0, config.head_dim, config.context_length);
  }
}

ForwardPass::ForwardPass(const Model& model, ThreadPool& pool)
    : model_(model),
      pool_(pool),
      buffers_(std::make_unique<Buffers>()),
      head_(std::make_unique<OutputHead>(model.config, model.weights, pool)) {}

ForwardPass::~ForwardPass() = default;

void ForwardPass::Step(std::span<const SequenceSlice> slices, float* logits) {
  Run(model_, pool_, *buffers_, *head_, slices).Step(logits);
}

}  // namespace gkv
