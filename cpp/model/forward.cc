// One step of a model, written in the order in which it is described:
// embedding, then per layer attention or a recurrence, and feed-forward, then
// the head. Work is cut into independent tasks over rows, weight groups,
// attention tiles or blocks of channels; no result depends on the cut.

#include "model/forward.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "model/activations.h"
#include "model/layers/altup.h"
#include "model/layers/attention.h"
#include "model/layers/experts.h"
#include "model/layers/feed_forward.h"
#include "model/layers/laurel.h"
#include "model/layers/per_layer_embedding.h"
#include "model/layers/recurrent.h"
#include "model/output_head.h"
#include "model/step_work.h"
#include "ops/elementwise.h"

namespace gkv {

class ForwardPass::Parts {
 public:
  Parts(const Model& model, ThreadPool& pool, std::vector<size_t> reads)
      : config_(model.config),
        weights_(model.weights),
        pool_(pool),
        own_layers_(OwnLayers(config_)),
        attention_(config_, std::move(reads)),
        recurrent_(config_),
        experts_(config_),
        per_layer_(config_),
        altup_(config_),
        laurel_(config_),
        head_(config_, weights_, pool) {}

  void Step(std::span<const SequenceSlice> slices) {
    rows_.clear();
    for (size_t s = 0; s < slices.size(); ++s) {
      for (size_t i = 0; i < slices[s].tokens.size(); ++i) {
        rows_.push_back({s, slices[s].begin() + i, slices[s].tokens[i]});
      }
    }
    const StepWork all(slices, rows_, pool_);
    Embed(all);
    size_t done = own_layers_;
    if (LeavesOnlyKeys(slices)) --done;
    RunLayers(all, 0, done);
    if (done < own_layers_) LeaveKeys(all, done);
    slices = KeepOutputRows(slices, done < own_layers_);
    const StepWork work(slices, rows_, pool_);
    RunLayers(work, done, config_.num_layers(), done < own_layers_);
    if (has_altup() && !rows_.empty()) {
      altup_.Merge(weights_, input_, projected_.data(), x_.data(), work);
    }
    RunHead(slices);
  }

  const float* RunLayers(const StepWork& work,
                         const std::function<void(float* x)>& enter) {
    MakeRoom(work.rows().size());
    MakeRotations(work);
    enter(x_.data());
    RunLayers(work, 0, config_.num_layers());
    return x_.data();
  }

 private:
  // Returns the number of layers up to the last one that leaves something to
  // later steps.
  static size_t OwnLayers(const ModelConfig& config) {
    size_t count = config.num_layers();
    while (count > 0 && config.layers[count - 1].shares_kv) --count;
    return count;
  }

  // Whether there are rows without outputs, and these leave nothing but keys
  // and values in the last of those layers.
  bool LeavesOnlyKeys(std::span<const SequenceSlice> slices) const {
    if (own_layers_ == 0 || weights_.layers[own_layers_ - 1].recurrent) {
      return false;
    }
    return std::any_of(slices.begin(), slices.end(), [](const auto& slice) {
      return slice.output.rows < slice.tokens.size();
    });
  }

  // Runs the first part of a layer for all rows: they enter it and leave their
  // keys and values.
  void LeaveKeys(const StepWork& work, size_t i) {
    work.ForRows(StepPart::kNorms, [&](size_t row) { EnterLayer(i, row); });
    attention_.KeepKeys(weights_.layers[i], i, input_, work);
  }

  // Runs layers [begin, end). `left_keys`: LeaveKeys has done its part of the
  // first of them.
  void RunLayers(const StepWork& work, size_t begin, size_t end,
                 bool left_keys = false) {
    if (work.rows().empty()) return;
    const bool embeds = config_.ple_dim != 0;
    if (begin < end && !left_keys) {
      work.ForRows(StepPart::kNorms,
                   [&](size_t row) { EnterLayer(begin, row); });
    }
    for (size_t i = begin; i < end; ++i) {
      // The last work on a row in one layer is the first in the next.
      const auto leave_layer = [&](size_t row) {
        if (i + 1 < end) EnterLayer(i + 1, row);
      };
      MixPositions(work, i, left_keys && i == begin);
      const LayerWeights& layer = weights_.layers[i];
      feed_forward_.Compute(layer, config_.layers[i].sparsity_cutoff, input_,
                            projected_.data(), work);
      if (layer.experts) {
        experts_.Join(layer, x_.data(), projected_.data(), work);
      }
      work.ForRows(StepPart::kNorms, [&](size_t row) {
        AddToResidual(layer.experts ? none_ : layer.down_bias,
                      layer.post_ffn_norm, row);
        if (has_altup()) {
          altup_.Correct(layer, row, x(row),
                         embeds ? input_.row(row) : nullptr);
          if (embeds) input_.Quantize(row);
        } else if (embeds) {
          TakeStream(row);
        } else {
          ScaleOutput(layer, row);
        }
        if (!embeds) leave_layer(row);
      });
      if (!embeds) continue;
      per_layer_.Compute(layer, i, input_, projected_.data(), work);
      work.ForRows(StepPart::kNorms, [&](size_t row) {
        float* const added = projected_.data() + row * hidden();
        const float* const norm = layer.post_ple_norm.data();
        if (has_altup()) {
          RmsNorm(added, norm, config_.rms_epsilon, hidden(), added);
          altup_.AddToOthers(row, added);
        } else {
          AddRmsNorm(added, norm, config_.rms_epsilon, hidden(), x(row));
          ScaleOutput(layer, row);
        }
        leave_layer(row);
      });
    }
  }

  // Keeps only the rows that have outputs: later steps need nothing of what
  // follows. These rows move to the front, and with them, if they have
  // `entered` a layer, their input of it. Returns the slices that remain, in
  // the same order; they may be empty.
  std::span<const SequenceSlice> KeepOutputRows(
      std::span<const SequenceSlice> slices, bool entered) {
    const size_t all = rows_.size();
    wanted_.assign(slices.begin(), slices.end());
    size_t end = 0, kept = 0;
    for (SequenceSlice& slice : wanted_) {
      end += slice.tokens.size();
      slice.tokens = slice.tokens.last(slice.output.rows);
      for (size_t row = end - slice.output.rows; row < end; ++row, ++kept) {
        if (row == kept) continue;
        rows_[kept] = rows_[row];
        std::copy_n(x(row), hidden(), x(kept));
        if (entered) {
          input_.CopyRow(kept, input_, row, false);
          input_.CopyRow(kept, input_, row, true);
        }
        if (config_.ple_dim != 0) per_layer_.MoveRow(row, kept);
        if (has_altup()) altup_.MoveRow(row, kept);
      }
    }
    if (kept == all) return slices;
    rows_.resize(kept);
    input_.Resize(kept, hidden());
    MakeRotations({wanted_, rows_, pool_});
    return wanted_;
  }

  void MakeRotations(const StepWork& work) {
    attention_.Begin(work);
    work.ForRows(StepPart::kRope,
                 [&](size_t row) { attention_.Rotations(work, row); });
  }

  void MakeRoom(size_t rows) {
    x_.EnsureSize(rows * hidden());
    projected_.EnsureSize(rows * hidden());
    input_.Resize(rows, hidden());
  }

  size_t hidden() const { return config_.hidden_size; }
  bool has_altup() const { return config_.altup_inputs != 0; }
  float* x(size_t row) { return x_.data() + row * hidden(); }

  void Embed(const StepWork& work) {
    work.Enter(StepPart::kEmbedding);
    MakeRoom(rows_.size());
    attention_.Begin(work);
    weights_.embedding.RequireSound(work.pool());
    const PackedView embedding = weights_.embedding.view();
    work.ForRows(StepPart::kEmbedding, [&](size_t row) {
      UnpackRow(embedding, static_cast<size_t>(rows_[row].token), x(row));
      Scale(config_.embedding_scale, hidden(), x(row));
      attention_.Rotations(work, row);
      if (config_.ple_dim != 0 || has_altup()) TakeStream(row);
    });
    if (config_.ple_dim != 0) per_layer_.Begin(weights_, input_, work);
    if (has_altup()) altup_.Begin(weights_, input_, work);
  }

  void EnterLayer(size_t i, size_t row) {
    const LayerWeights& layer = weights_.layers[i];
    if (has_altup()) altup_.Predict(layer, row, x(row));
    NormInput(layer.attn_norm, row);
  }

  // Runs what mixes positions: attention or a recurrence, and LAuReL beside it.
  void MixPositions(const StepWork& work, size_t i, bool left_keys) {
    const LayerWeights& layer = weights_.layers[i];
    const bool has_laurel = config_.laurel_rank != 0;
    if (has_laurel) laurel_.Compute(layer, input_, work);
    Activations& mixed =
        layer.recurrent
            ? recurrent_.Mix(*layer.recurrent, i, input_, work)
            : attention_.Mix(layer, i, input_, work, left_keys);
    work.MatMuls(StepPart::kAttentionOutput,
                 {{&layer.o, &mixed, projected_.data()}});
    work.ForRows(StepPart::kNorms, [&](size_t row) {
      AddToResidual(layer.o_bias, layer.post_attn_norm, row);
      if (has_laurel) laurel_.AddTo(layer, row, input_.row(row), x(row));
      NormInput(layer.ffn_norm, row);
    });
  }

  void NormInput(const FloatVector& norm, size_t row) {
    RmsNorm(x(row), norm.data(), config_.rms_epsilon, hidden(),
            input_.row(row));
    input_.Quantize(row);
  }

  // Takes the residual stream as it is as the input of a product.
  void TakeStream(size_t row) {
    std::copy_n(x(row), hidden(), input_.row(row));
    input_.Quantize(row);
  }

  void ScaleOutput(const LayerWeights& layer, size_t row) {
    if (config_.layer_scales) Scale(layer.output_scale[0], hidden(), x(row));
  }

  void AddToResidual(const FloatVector& bias, const FloatVector& post_norm,
                     size_t row) {
    float* const projected = projected_.data() + row * hidden();
    AddBias(bias, projected);
    if (config_.post_norms) {
      AddRmsNorm(projected, post_norm.data(), config_.rms_epsilon, hidden(),
                 x(row));
    } else {
      Add(projected, hidden(), x(row));
    }
  }

  void RunHead(std::span<const SequenceSlice> slices) {
    pool_.Enter(StepPart::kNorms);
    std::vector<OutputHead::Row> rows;
    size_t end = 0;
    for (const SequenceSlice& slice : slices) {
      end += slice.tokens.size();
      const RowOutput& output = slice.output;
      for (size_t i = 0; i < output.rows; ++i) {
        const float* row = x(end - output.rows + i);
        if (output.kind == RowOutput::kHidden) {
          RmsNorm(row, weights_.final_norm.data(), config_.rms_epsilon,
                  hidden(), output.data + i * hidden());
        } else {
          if (output.states != nullptr) {
            RmsNorm(row, weights_.final_norm.data(), config_.rms_epsilon,
                    hidden(), output.states + i * hidden());
          }
          if (output.kind == RowOutput::kLargest) {
            rows.push_back({row, nullptr, output.tokens + i, output.count});
          } else {
            rows.push_back({row, output.data + i * config_.vocab_size});
          }
        }
      }
    }
    head_.Compute(rows);
  }

  const ModelConfig& config_;
  const Weights& weights_;
  ThreadPool& pool_;

  const size_t own_layers_;

  std::vector<StepRow> rows_;
  std::vector<SequenceSlice> wanted_;  // the slices' rows that have outputs
  AlignedBuffer<float> x_;          // [rows, hidden_size], the residual stream
  Activations input_;               // [rows, hidden_size], normalized
  AlignedBuffer<float> projected_;  // [rows, hidden_size]
  const FloatVector none_;          // in place of a bias that is added already
  Attention attention_;
  Recurrent recurrent_;
  FeedForward feed_forward_;
  Experts experts_;
  PerLayerEmbedding per_layer_;
  AltUp altup_;
  Laurel laurel_;
  OutputHead head_;
};

ForwardPass::ForwardPass(const Model& model, ThreadPool& pool,
                         std::vector<size_t> reads)
    : parts_(std::make_unique<Parts>(model, pool, std::move(reads))) {}

ForwardPass::~ForwardPass() = default;

void ForwardPass::Step(std::span<const SequenceSlice> slices) {
  parts_->Step(slices);
}

const float* ForwardPass::RunLayers(
    const StepWork& work, const std::function<void(float* x)>& enter) {
  return parts_->RunLayers(work, enter);
}

}  // namespace gkv
