#include "model/layers/experts.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise.h"

namespace gkv {

void Experts::Join(const LayerWeights& weights, const float* x, float* out,
                   const StepWork& work) {
  const ExpertWeights& w = *weights.experts;
  const size_t rows = work.rows().size(), hidden = config_.hidden_size;
  const size_t used = config_.experts_used, width = config_.expert_ffn_dim;
  const size_t count = rows * used;
  routed_.Resize(rows, hidden);
  input_.Resize(rows, hidden);
  scores_.EnsureSize(rows * config_.num_experts);
  chosen_.resize(count);
  factors_.resize(count);
  const auto scale = static_cast<float>(
      1 / std::sqrt(static_cast<double>(hidden)));
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    const float* const stream = x + row * hidden;
    RmsNorm(stream, w.router_scale.data(), config_.rms_epsilon, hidden,
            routed_.row(row));
    Scale(scale, hidden, routed_.row(row));
    RmsNorm(stream, w.norm.data(), config_.rms_epsilon, hidden,
            input_.row(row));
    input_.Quantize(row);
  });
  work.MatMuls(StepPart::kExperts,
               {{&w.router, &routed_, scores_.data()}});
  work.ForRows(StepPart::kRouting, [&](size_t row) { Choose(w, row); });
  SortByExpert(rows);

  gathered_.Resize(count, hidden);
  gate_up_.EnsureSize(count * 2 * width);
  parts_.clear();
  if (w.gate_up.rows != 0) {
    Gather(w.gate_up.type, work);
    AddParts(w.gate_up, 2 * width, gathered_, gate_up_.data(), 2 * width, work);
  } else {
    Gather(w.gate.type, work);
    if (UsesQuantizedActivations(w.up.type) !=
        UsesQuantizedActivations(w.gate.type)) {
      Gather(w.up.type, work);
    }
    AddParts(w.gate, width, gathered_, gate_up_.data(), 2 * width, work);
    AddParts(w.up, width, gathered_, gate_up_.data() + width, 2 * width, work);
  }
  work.MatMuls(StepPart::kExperts, parts_);

  activated_.Resize(count, width);
  work.ForEach(StepPart::kActivation, count, [&](size_t i) {
    const float* const gate = gate_up_.data() + i * 2 * width;
    GeluMul(gate, gate + width, width, activated_.row(i));
    activated_.Quantize(i);
  });
  projected_.EnsureSize(count * hidden);
  parts_.clear();
  AddParts(w.down, hidden, activated_, projected_.data(), hidden, work);
  work.MatMuls(StepPart::kExperts, parts_);

  work.ForRows(StepPart::kRouting, [&](size_t row) {
    const size_t first = row * used;
    float* const sum = projected_.data() + place_[first] * hidden;
    Scale(factors_[first], hidden, sum);
    for (size_t i = first + 1; i < first + used; ++i) {
      AddScaled(factors_[i], projected_.data() + place_[i] * hidden, hidden,
                sum);
    }
    float* const dense = out + row * hidden;
    AddBias(weights.down_bias, dense);
    RmsNorm(dense, w.dense_norm.data(), config_.rms_epsilon, hidden, dense);
    AddRmsNorm(sum, w.post_norm.data(), config_.rms_epsilon, hidden, dense);
  });
}

// Chooses the experts with the largest scores. Their factors are their shares
// among each other, times the scale of each expert. The shares are a softmax
// over all experts, divided by its sum over those that are chosen.
void Experts::Choose(const ExpertWeights& weights, size_t row) {
  const size_t used = config_.experts_used;
  const float* const scores = scores_.data() + row * config_.num_experts;
  uint32_t* const chosen = chosen_.data() + row * used;
  float* const factors = factors_.data() + row * used;
  // In this loop they are in descending order of scores. A later expert must
  // have a larger score to come before an earlier one.
  for (size_t expert = 0, count = 0; expert < config_.num_experts; ++expert) {
    if (count == used && !(scores[expert] > scores[chosen[used - 1]])) continue;
    size_t at = count < used ? count++ : used - 1;
    for (; at > 0 && scores[expert] > scores[chosen[at - 1]]; --at) {
      chosen[at] = chosen[at - 1];
    }
    chosen[at] = static_cast<uint32_t>(expert);
  }
  std::sort(chosen, chosen + used);
  for (size_t i = 0; i < used; ++i) factors[i] = scores[chosen[i]];
  Softmax(used, factors);
  for (size_t i = 0; i < used; ++i) {
    factors[i] *= weights.expert_scale[chosen[i]];
  }
}

void Experts::SortByExpert(size_t rows) {
  const size_t used = config_.experts_used;
  begin_.assign(config_.num_experts + 1, 0);
  for (const uint32_t expert : chosen_) ++begin_[expert + 1];
  for (size_t e = 0; e < config_.num_experts; ++e) begin_[e + 1] += begin_[e];
  place_.resize(rows * used);
  row_of_.resize(rows * used);
  for (size_t i = 0; i < place_.size(); ++i) {
    place_[i] = begin_[chosen_[i]]++;
    row_of_[place_[i]] = i / used;
  }
  // Each begin_[e] has moved on to where expert e + 1 begins.
  for (size_t e = config_.num_experts; e > 0; --e) begin_[e] = begin_[e - 1];
  begin_[0] = 0;
}

void Experts::Gather(TensorType type, const StepWork& work) {
  const bool quantized = UsesQuantizedActivations(type);
  work.ForEach(StepPart::kRouting, row_of_.size(), [&](size_t i) {
    gathered_.CopyRow(i, input_, row_of_[i], quantized);
  });
}

void Experts::AddParts(const PackedMatrix& matrix, size_t height,
                       Activations& input, float* out, size_t stride,
                       const StepWork& work) {
  matrix.RequireSound(work.pool());
  const PackedView view = matrix.view();
  const size_t bytes = NumGroups(height) * GroupBytes(view.type, view.cols);
  for (size_t e = 0; e < config_.num_experts; ++e) {
    const size_t begin = begin_[e], count = begin_[e + 1] - begin;
    if (count == 0) continue;
    parts_.push_back({{view.type, height, view.cols, view.data + e * bytes},
                      {input.row(begin), input.cols, input.quantized(begin),
                       count},
                      out + begin * stride,
                      stride});
  }
}

}  // namespace gkv
