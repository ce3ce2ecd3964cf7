#include "model/layers/laurel.h"

#include "ops/elementwise.h"

namespace gkv {
namespace {

constexpr float kRootOfHalf = 0.70710678f;

}  // namespace

void Laurel::Compute(const LayerWeights& weights, Activations& input,
                     const StepWork& work) {
  const size_t rows = work.rows().size();
  low_.Resize(rows, config_.laurel_rank);
  product_.EnsureSize(rows * config_.hidden_size);
  work.MatMuls(StepPart::kAltUp,
               {{&weights.laurel_left, &input, low_.floats.data()}});
  work.ForRows(StepPart::kNorms, [&](size_t row) { low_.Quantize(row); });
  work.MatMuls(StepPart::kAltUp,
               {{&weights.laurel_right, &low_, product_.data()}});
}

void Laurel::AddTo(const LayerWeights& weights, size_t row, const float* input,
                   float* x) {
  const size_t hidden = config_.hidden_size;
  float* const product = product_.data() + row * hidden;
  RmsNorm(product, weights.laurel_post_norm.data(), config_.rms_epsilon, hidden,
          product);
  Add(input, hidden, product);
  Add(product, hidden, x);
  Scale(kRootOfHalf, hidden, x);
}

}  // namespace gkv
