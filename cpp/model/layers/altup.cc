#include "model/layers/altup.h"

#include <algorithm>

#include "ops/altup.h"
#include "ops/elementwise.h"

namespace gkv {

void AltUp::Begin(const Weights& weights, Activations& input,
                  const StepWork& work) {
  stride_ = work.rows().size() * hidden();
  streams_.EnsureSize(config_.altup_inputs * stride_);
  for (size_t i = 1; i < config_.altup_inputs; ++i) {
    work.MatMuls(StepPart::kAltUp,
                 {{&weights.altup_proj[i - 1], &input, stream(i, 0)}});
  }
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    std::copy_n(input.row(row), hidden(), stream(0, row));
    for (size_t i = 1; i < config_.altup_inputs; ++i) {
      MatchRms(input.row(row), hidden(), stream(i, row));
    }
  });
}

void AltUp::MoveRow(size_t from, size_t to) {
  for (size_t i = 0; i < config_.altup_inputs; ++i) {
    std::copy_n(stream(i, from), hidden(), stream(i, to));
  }
}

void AltUp::Route(const LayerWeights& weights, const float* x,
                  float* routes) const {
  AltUpRoute(x, weights.altup_router_norm.data(), weights.altup_router.data(),
             config_.rms_epsilon, hidden(), config_.altup_inputs, routes);
}

void AltUp::Predict(const LayerWeights& weights, size_t row, float* x) {
  float routes[kMaxAltUpInputs];
  Route(weights, stream(config_.altup_active, row), routes);
  AltUpPredict(weights.altup_predict.data(), routes, hidden(),
               config_.altup_inputs, stride_, stream(0, row));
  std::copy_n(stream(config_.altup_active, row), hidden(), x);
}

void AltUp::Correct(const LayerWeights& weights, size_t row, const float* x,
                    float* gated) {
  float routes[kMaxAltUpInputs];
  Route(weights, x, routes);
  AltUpCorrect(weights.altup_correct.data(), routes, x, hidden(),
               config_.altup_inputs, config_.altup_active, stride_,
               stream(0, row));
  if (gated == nullptr) return;
  std::copy_n(stream(config_.altup_active, row), hidden(), gated);
  if (config_.altup_correct_scale) {
    Multiply(weights.altup_scale.data(), hidden(), gated);
  }
}

void AltUp::AddToOthers(size_t row, const float* y) {
  for (size_t i = 1; i < config_.altup_inputs; ++i) {
    Add(y, hidden(), stream(i, row));
  }
}

void AltUp::Merge(const Weights& weights, Activations& input, float* projected,
                  float* x, const StepWork& work) {
  const size_t inputs = config_.altup_inputs;
  for (size_t i = 1; i < inputs; ++i) {
    work.ForRows(StepPart::kNorms, [&](size_t row) {
      std::copy_n(stream(i, row), hidden(), input.row(row));
      input.Quantize(row);
    });
    work.MatMuls(StepPart::kAltUp,
                 {{&weights.altup_unembed[i - 1], &input, projected}});
    work.ForRows(StepPart::kNorms, [&](size_t row) {
      float* const out = x + row * hidden();
      float* const added = projected + row * hidden();
      if (i == 1) std::copy_n(stream(0, row), hidden(), out);
      MatchRms(stream(0, row), hidden(), added);
      Add(added, hidden(), out);
      if (i + 1 < inputs) return;
      Scale(1 / static_cast<float>(inputs), hidden(), out);
    });
  }
}

}  // namespace gkv
