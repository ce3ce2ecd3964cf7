#include "model/layers/attention.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise.h"
#include "ops/kv_strip.h"

namespace gkv {

Attention::Attention(const ModelConfig& config, std::vector<size_t> reads)
    : config_(config), plan_(config, std::move(reads)) {
  size_t head_dim = 0;
  for (const LayerConfig& layer : config.layers) {
    rope_of_.push_back(
        layer.kind == LayerKind::kRecurrent ? 0 : RopeOf(layer));
    head_dim = std::max(head_dim, layer.head_dim);
  }
  ones_ = FloatVector(head_dim);
  std::fill_n(ones_.data(), head_dim, 1.0f);
}

size_t Attention::RopeOf(const LayerConfig& layer) {
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const Rope& rope = ropes_[i];
    if (rope.base == layer.rope_base && rope.factor == layer.rope_factor &&
        rope.dim == layer.rope_dim && rope.still_pairs == layer.still_pairs) {
      return i;
    }
  }
  ropes_.push_back({layer.rope_base,
                    layer.rope_factor,
                    layer.rope_dim,
                    layer.still_pairs,
                    RopeTable(layer.rope_base, layer.rope_factor,
                              layer.rope_dim, layer.still_pairs),
                    {},
                    {}});
  return ropes_.size() - 1;
}

void Attention::Begin(const StepWork& work) {
  size_t positions = 0;
  for (const SequenceSlice& slice : work.slices()) {
    positions = std::max(positions, slice.view->end);
  }
  for (Rope& rope : ropes_) {
    rope.table.Reserve(positions);
    rope.cos.EnsureSize(work.rows().size() * rope.dim / 2);
    rope.sin.EnsureSize(work.rows().size() * rope.dim / 2);
  }
  plan_.Cut(work.slices(), work.pool().num_threads());
}

void Attention::Rotations(const StepWork& work, size_t row) {
  for (Rope& rope : ropes_) {
    const size_t at = row * rope.dim / 2;
    rope.table.CosSin(work.rows()[row].position, rope.cos.data() + at,
                      rope.sin.data() + at);
  }
}

void Attention::KeepKeys(const LayerWeights& weights, size_t layer,
                         Activations& input, const StepWork& work) {
  const LayerConfig& shape = config_.layers[layer];
  const size_t size = work.rows().size() * shape.kv_heads * shape.head_dim;
  k_.EnsureSize(size);
  v_.EnsureSize(size);
  if (weights.v.rows == 0) {
    work.MatMuls(StepPart::kQkv, {{&weights.k, &input, k_.data()}});
  } else {
    work.MatMuls(StepPart::kQkv, {{&weights.k, &input, k_.data()},
                                  {&weights.v, &input, v_.data()}});
  }
  work.ForRows(StepPart::kRope,
               [&](size_t row) { Keep(weights, layer, row, work); });
}

Activations& Attention::Mix(const LayerWeights& weights, size_t layer,
                            Activations& input, const StepWork& work,
                            bool kept) {
  const LayerConfig& shape = config_.layers[layer];
  const size_t rows = work.rows().size();
  const size_t q_dim = shape.num_heads * shape.head_dim;
  const size_t kv_dim = shape.kv_heads * shape.head_dim;
  q_.EnsureSize(rows * q_dim);
  attended_.Resize(rows, q_dim);
  const bool keeps = !kept && !shape.shares_kv && config_.target_hidden == 0;
  if (!keeps) {
    work.MatMuls(StepPart::kQkv, {{&weights.q, &input, q_.data()}});
  } else {
    k_.EnsureSize(rows * kv_dim);
    v_.EnsureSize(rows * kv_dim);
    if (weights.v.rows == 0) {
      work.MatMuls(StepPart::kQkv, {{&weights.q, &input, q_.data()},
                                    {&weights.k, &input, k_.data()}});
    } else {
      work.MatMuls(StepPart::kQkv, {{&weights.q, &input, q_.data()},
                                    {&weights.k, &input, k_.data()},
                                    {&weights.v, &input, v_.data()}});
    }
  }
  // All keys and values of the step are stored before any row attends.
  work.ForRows(StepPart::kRope, [&](size_t row) {
    float* const q = q_.data() + row * q_dim;
    FinishHeads(layer, weights.q_norm, row, shape.num_heads, q);
    Scale(static_cast<float>(config_.query_scale), q_dim, q);
    if (keeps) Keep(weights, layer, row, work);
  });
  work.Enter(StepPart::kAttention);
  plan_.Attend(work.slices(), layer, q_.data(), attended_, work.pool());
  return attended_;
}

// Of a row's products in k_ and v_.
void Attention::Keep(const LayerWeights& weights, size_t layer, size_t row,
                     const StepWork& work) {
  const LayerConfig& shape = config_.layers[layer];
  const StepRow& info = work.rows()[row];
  const SequenceSlice& slice = work.slices()[info.slice];
  if (info.position <
      slice.view->groups[slice.layout->group_of(layer)].write_begin) {
    return;
  }
  const size_t kv_dim = shape.kv_heads * shape.head_dim;
  float* const k = k_.data() + row * kv_dim;
  float* const v = v_.data() + row * kv_dim;
  if (weights.v.rows == 0) std::copy_n(k, kv_dim, v);
  FinishHeads(layer, weights.k_norm, row, shape.kv_heads, k);
  FinishValues(shape, v);
  Store(layer, info, slice, k, v);
}

// Norms and rotates heads of a row.
void Attention::FinishHeads(size_t layer, const FloatVector& norm, size_t row,
                            size_t heads, float* x) const {
  const size_t head_dim = config_.layers[layer].head_dim;
  const Rope& rope = ropes_[rope_of_[layer]];
  const size_t at = row * rope.dim / 2;
  for (const float* end = x + heads * head_dim; x < end; x += head_dim) {
    if (config_.qk_norm) {
      RmsNorm(x, norm.data(), config_.rms_epsilon, head_dim, x);
    }
    Rotate(rope.cos.data() + at, rope.sin.data() + at, rope.dim, x);
  }
}

void Attention::FinishValues(const LayerConfig& shape, float* v) const {
  if (!config_.value_norm) return;
  for (size_t head = 0; head < shape.kv_heads; ++head, v += shape.head_dim) {
    RmsNorm(v, ones_.data(), config_.rms_epsilon, shape.head_dim, v);
  }
}

void Attention::Store(size_t layer, const StepRow& row,
                      const SequenceSlice& slice, const float* k,
                      const float* v) const {
  const LayerConfig& shape = config_.layers[layer];
  const KvLayout& layout = *slice.layout;
  const GroupStep& table = slice.view->groups[layout.group_of(layer)];
  const size_t block_tokens = layout.block_tokens();
  const size_t index = row.position % block_tokens;
  uint8_t* const block =
      table.blocks[row.position / block_tokens - table.first_block];
  for (size_t head = 0; head < shape.kv_heads; ++head) {
    const size_t at = head * shape.head_dim;
    StoreKey(layout.dtype(), k + at, shape.head_dim, index, block_tokens,
             block + layout.key_offset(layer, head));
    StoreValue(layout.dtype(), v + at, shape.head_dim, index, block_tokens,
               block + layout.value_offset(layer, head));
  }
}

}  // namespace gkv
