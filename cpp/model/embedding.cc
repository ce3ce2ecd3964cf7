#include "model/embedding.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/fp_environment.h"
#include "base/rounding.h"
#include "model/step_work.h"

namespace gkv {
namespace {

constexpr size_t kBlockTokens = 128;

// Returns a layout in which all layers whose keys and values are of one shape
// store them in one place. Each position has a place of its own there, since
// the mask takes care of windows.
KvLayout SharedLayout(const ModelConfig& config) {
  std::vector<KvLayerSpec> specs;
  for (const LayerConfig& layer : config.layers) {
    KvLayerSpec spec{.kind = LayerKind::kFull,
                     .kv_heads = layer.kv_heads,
                     .head_dim = layer.head_dim};
    const auto alike =
        std::find_if(specs.begin(), specs.end(), [&](const KvLayerSpec& s) {
          return s.kv_heads == spec.kv_heads && s.head_dim == spec.head_dim;
        });
    if (alike != specs.end()) {
      spec.shares = static_cast<size_t>(alike - specs.begin());
    }
    specs.push_back(spec);
  }
  return {std::move(specs), KvDtype::kF32, kBlockTokens};
}

}  // namespace

size_t VectorSize(const ModelConfig& config) {
  return config.embedding_dim != 0 ? config.embedding_dim : config.hidden_size;
}

std::vector<size_t> EmbeddingDims(const ModelConfig& config) {
  std::vector<size_t> dims = {VectorSize(config)};
  if (!config.bidirectional) return dims;
  for (const size_t dim : {512, 256, 128}) {
    if (dim < dims[0]) dims.push_back(dim);
  }
  return dims;
}

void AddToSums(const float* row, size_t size, double* sums) {
  for (size_t i = 0; i < size; ++i) sums[i] += static_cast<double>(row[i]);
}

void UnitVector(const float* vector, size_t dim, float* out) {
  const ScopedFpEnvironment fp_environment;
  double squares = 0;
  for (size_t i = 0; i < dim; ++i) {
    squares += static_cast<double>(vector[i]) * static_cast<double>(vector[i]);
  }
  const double factor = squares > 0 ? 1 / std::sqrt(squares) : 1;
  for (size_t i = 0; i < dim; ++i) {
    out[i] = static_cast<float>(static_cast<double>(vector[i]) * factor);
  }
}

EmbeddingPass::EmbeddingPass(const Model& model, ThreadPool& pool)
    : model_(model),
      pool_(pool),
      layout_(SharedLayout(model.config)),
      pass_(model, pool) {}

void EmbeddingPass::Run(std::span<const Text> texts) {
  const size_t hidden = model_.config.hidden_size;
  const std::span<const KvGroup> groups = layout_.groups();
  size_t rows = 0, bytes = 0;
  for (const Text& text : texts) {
    rows += text.tokens.size();
    for (const KvGroup& group : groups) {
      bytes += CeilDiv(text.tokens.size(), kBlockTokens) * group.block_bytes;
    }
  }
  hidden_.EnsureSize(rows * hidden);
  blocks_.EnsureSize(bytes);

  std::vector<KvStepView> views(texts.size());
  std::vector<SequenceSlice> slices;
  uint8_t* block = blocks_.data();
  float* states = hidden_.data();
  for (size_t t = 0; t < texts.size(); ++t) {
    const size_t length = texts[t].tokens.size();
    views[t].end = length;
    for (const KvGroup& group : groups) {
      GroupStep& step = views[t].groups.emplace_back();
      for (size_t i = 0; i < CeilDiv(length, kBlockTokens); ++i) {
        step.blocks.push_back(block);
        block += group.block_bytes;
      }
    }
    slices.push_back({texts[t].tokens, &views[t], &layout_,
                      {RowOutput::kHidden, length, states}});
    states += length * hidden;
  }
  pass_.Step(slices);
  pool_.Enter(StepPart::kHead);

  const size_t size = model_.config.embedding_dim;
  const bool dense = model_.config.dense_dim != 0 || size != 0;
  // There are few rows, so they get 16-bit precision.
  if (dense) means_.Resize(texts.size(), hidden, kFinePlanes);
  pool_.Run(texts.size(), [&](size_t t, size_t) {
    float* const mean = dense ? means_.row(t) : texts[t].out;
    const float* const state = slices[t].output.data;
    const size_t length = texts[t].tokens.size();
    // The columns are taken in stretches, so that nothing is allocated here.
    constexpr size_t kStretch = 64;
    for (size_t begin = 0; begin < hidden; begin += kStretch) {
      const size_t count = std::min(kStretch, hidden - begin);
      double sums[kStretch] = {};
      for (size_t row = 0; row < length; ++row) {
        AddToSums(state + row * hidden + begin, count, sums);
      }
      for (size_t i = 0; i < count; ++i) {
        mean[begin + i] =
            static_cast<float>(sums[i] / static_cast<double>(length));
      }
    }
  });
  if (!dense) return;
  if (size != 0) {
    projected_.EnsureSize(texts.size() * size);
    Multiply(StepPart::kHead, model_.weights.embedding_projection, means_,
             pool_, products_, projected_.data());
    for (size_t t = 0; t < texts.size(); ++t) {
      std::copy_n(projected_.data() + t * size, size, texts[t].out);
    }
    return;
  }
  inner_.Resize(texts.size(), model_.config.dense_dim, kFinePlanes);
  Multiply(StepPart::kHead, model_.weights.dense_2, means_, pool_, products_,
           inner_.floats.data());
  Multiply(StepPart::kHead, model_.weights.dense_3, inner_, pool_, products_,
           means_.floats.data());
  for (size_t t = 0; t < texts.size(); ++t) {
    std::copy_n(means_.row(t), hidden, texts[t].out);
  }
}

}  // namespace gkv
