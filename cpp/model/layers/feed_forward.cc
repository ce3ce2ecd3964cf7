#include "model/layers/feed_forward.h"

#include <cmath>

#include "ops/elementwise.h"

namespace gkv {

void FeedForward::Compute(const LayerWeights& weights, double cutoff,
                          Activations& input, float* out,
                          const StepWork& work) {
  const size_t rows = work.rows().size();
  const size_t width = weights.gate.rows;
  activated_.Resize(rows, width);
  if (!std::isfinite(cutoff)) {
    // A stretch of the activation needs the same stretch of both products
    // alone: no thread waits for another in between, nor does one do this by
    // itself for steps of few rows.
    const bool quantized = UsesQuantizedActivations(weights.down.type);
    work.MatMulPair(
        StepPart::kGateUp, weights.gate, weights.up, input, gate_,
        [&](const PairStretch& part) {
          const size_t begin = part.begin, end = part.end;
          for (size_t row = 0; row < rows; ++row) {
            float* const g = part.a + row * part.stride;
            float* const u = part.b + row * part.stride;
            AddBias(weights.gate_bias, begin, end, g);
            AddBias(weights.up_bias, begin, end, u);
            if (quantized) {
              GeluMul(g, u, end - begin, g);
              activated_.QuantizeStretch(row, begin, end, g);
            } else {
              GeluMul(g, u, end - begin, activated_.row(row) + begin);
            }
          }
        });
    work.MatMuls(StepPart::kDown, {{&weights.down, &activated_, out}});
    return;
  }
  gate_.EnsureSize(rows * width);
  up_.EnsureSize(rows * width);
  const MatMulJob gate{&weights.gate, &input, gate_.data()};
  const MatMulJob up{&weights.up, &input, up_.data()};
  work.MatMuls(StepPart::kGateUp, {gate, up});
  work.ForRows(StepPart::kActivation, [&](size_t row) {
    float* const g = gate_.data() + row * width;
    float* const u = up_.data() + row * width;
    AddBias(weights.gate_bias, g);
    AddBias(weights.up_bias, u);
    GaussianTopK(static_cast<float>(cutoff), width, g);
    GeluMul(g, u, width, activated_.row(row));
    activated_.Quantize(row);
  });
  work.MatMuls(StepPart::kDown, {{&weights.down, &activated_, out}});
}

}  // namespace gkv
