#include "model/layers/feed_forward.h"

#include <cmath>

#include "ops/elementwise.h"

namespace gkv {

void FeedForward::Compute(const LayerWeights& weights, double cutoff,
                          Activations& input, float* out,
                          const StepWork& work) {
  const size_t rows = work.rows().size();
  const size_t width = weights.gate.rows;
  const bool sparse = std::isfinite(cutoff);
  const bool quantized = UsesQuantizedActivations(weights.down.type);
  activated_.Resize(rows, width);
  // Makes columns [begin, end) of a row of both products input of the last one.
  const auto activate = [&](size_t row, size_t begin, size_t end, float* gate,
                            float* up) {
    AddBias(weights.gate_bias, begin, end, gate);
    AddBias(weights.up_bias, begin, end, up);
    if (sparse) GaussianTopK(static_cast<float>(cutoff), width, gate);
    if (quantized) {
      GeluMul(gate, up, end - begin, gate);
      activated_.QuantizeStretch(row, begin, end, gate);
    } else {
      GeluMul(gate, up, end - begin, activated_.row(row) + begin);
    }
  };
  if (sparse) {
    // The cutoff depends on all columns of a row.
    gate_.EnsureSize(rows * width);
    up_.EnsureSize(rows * width);
    work.MatMuls(StepPart::kGateUp, {{&weights.gate, &input, gate_.data()},
                                     {&weights.up, &input, up_.data()}});
    work.ForRows(StepPart::kActivation, [&](size_t row) {
      activate(row, 0, width, gate_.data() + row * width,
               up_.data() + row * width);
    });
  } else {
    // A stretch of the activation needs the same stretch of both products
    // alone: no thread waits for another in between, nor does one do this by
    // itself for steps of few rows.
    work.MatMulPair(StepPart::kGateUp, weights.gate, weights.up, input, gate_,
                    [&](const PairStretch& part) {
                      for (size_t row = 0; row < rows; ++row) {
                        activate(row, part.begin, part.end,
                                 part.a + row * part.stride,
                                 part.b + row * part.stride);
                      }
                    });
  }
  work.MatMuls(StepPart::kDown, {{&weights.down, &activated_, out}});
}

}  // namespace gkv
