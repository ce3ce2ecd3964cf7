#include "model/layers/per_layer_embedding.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise.h"
#include "ops/stored_row.h"

namespace gkv {

void PerLayerEmbedding::Begin(const Weights& weights, Activations& input,
                              const StepWork& work) {
  const size_t rows = weights.ple_table.rows;
  const auto table_row = [&](const StepRow& row) {
    const auto token = static_cast<size_t>(row.token);
    return token < rows ? token : 0;
  };
  for (const StepRow& row : work.rows()) {
    if (rows != 0) weights.ple_table.Prefetch(table_row(row));
  }
  vectors_.EnsureSize(work.rows().size() * width());
  work.MatMuls(StepPart::kPerLayerEmbeddings,
               {{&weights.ple_proj, &input, vectors_.data()}});
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    Join(weights, row, table_row(work.rows()[row]));
  });
}

// The vectors are
// (norm(projected / sqrt(hidden_size)) + table * sqrt(ple_dim)) / sqrt(2), or
// the norm alone if there is no table.
void PerLayerEmbedding::Join(const Weights& weights, size_t row,
                             size_t table_row) {
  const auto root = [](size_t size) {
    return std::sqrt(static_cast<double>(size));
  };
  float* const out = vectors(row);
  Scale(static_cast<float>(1 / root(config_.hidden_size)), width(), out);
  for (size_t i = 0; i < width(); i += config_.ple_dim) {
    RmsNorm(out + i, weights.ple_norm.data(), config_.rms_epsilon,
            config_.ple_dim, out + i);
  }
  const RowTable& table = weights.ple_table;
  if (table.rows == 0) return;
  const uint8_t* const stored = table.row(table_row);
  for (size_t i = 0; i < width(); i += kMaxStoredCols) {
    float values[kMaxStoredCols];
    const size_t count = std::min(kMaxStoredCols, width() - i);
    UnpackStored(table.type, stored + RowBytes(table.type, i), count, values);
    Scale(static_cast<float>(root(config_.ple_dim)), count, values);
    Add(values, count, out + i);
  }
  Scale(static_cast<float>(1 / root(2)), width(), out);
}

void PerLayerEmbedding::MoveRow(size_t from, size_t to) {
  std::copy_n(vectors(from), width(), vectors(to));
}

void PerLayerEmbedding::Compute(const LayerWeights& weights, size_t layer,
                                Activations& input, float* out,
                                const StepWork& work) {
  const size_t rows = work.rows().size();
  const size_t dim = config_.ple_dim;
  gate_.EnsureSize(rows * dim);
  gated_.Resize(rows, dim);
  work.MatMuls(StepPart::kPerLayerEmbeddings,
               {{&weights.ple_gate, &input, gate_.data()}});
  work.ForRows(StepPart::kActivation, [&](size_t row) {
    GeluMul(gate_.data() + row * dim, vectors(row) + layer * dim, dim,
            gated_.row(row));
    gated_.Quantize(row);
  });
  work.MatMuls(StepPart::kPerLayerEmbeddings,
               {{&weights.ple_proj, &gated_, out}});
}

}  // namespace gkv
