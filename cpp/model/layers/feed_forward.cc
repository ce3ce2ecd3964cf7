#include "model/layers/feed_forward.h"

#include <cmath>

#include "ops/elementwise.h"

namespace gkv {

void FeedForward::Compute(const LayerWeights& weights, double cutoff,
                          Activations& input, float* out,
                          const StepWork& work) {
  const size_t rows = work.rows().size();
  const size_t width = weights.gate.rows;
  gate_.EnsureSize(rows * width);
  up_.EnsureSize(rows * width);
  activated_.Resize(rows, width);
  work.MatMuls(StepPart::kGateUp, {{&weights.gate, &input, gate_.data()},
                                   {&weights.up, &input, up_.data()}});
  work.ForRows(StepPart::kActivation, [&](size_t row) {
    float* const gate = gate_.data() + row * width;
    float* const up = up_.data() + row * width;
    AddBias(weights.gate_bias, gate);
    AddBias(weights.up_bias, up);
    if (std::isfinite(cutoff)) {
      GaussianTopK(static_cast<float>(cutoff), width, gate);
    }
    GeluMul(gate, up, width, activated_.row(row));
    activated_.Quantize(row);
  });
  work.MatMuls(StepPart::kDown, {{&weights.down, &activated_, out}});
}

}  // namespace gkv
