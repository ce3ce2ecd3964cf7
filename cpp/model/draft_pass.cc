#include "model/draft_pass.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

constexpr const char* NameOf(LayerKind kind) {
  return kind == LayerKind::kFull ? "full" : "sliding";
}

}  // namespace

std::vector<size_t> LayersRead(const ModelConfig& drafter,
                               const ModelConfig& target) {
  std::vector<size_t> layers;
  for (const LayerConfig& layer : drafter.layers) {
    size_t i = target.num_layers();
    while (i > 0 && (target.layers[i - 1].kind != layer.kind ||
                     target.layers[i - 1].shares_kv)) {
      --i;
    }
    layers.push_back(i - 1);
  }
  return layers;
}

void ChooseLargest(std::span<float> scores, size_t count,
                   std::span<uint32_t> chosen) {
  for (float& score : scores) {
    if (std::isnan(score)) score = -std::numeric_limits<float>::infinity();
  }
  std::iota(chosen.begin(), chosen.end(), 0u);
  const auto before = [&](uint32_t a, uint32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::nth_element(chosen.begin(),
                   chosen.begin() + static_cast<ptrdiff_t>(count - 1),
                   chosen.end(), before);
}

void RequireDrafterFor(const ModelConfig& drafter, const ModelConfig& target) {
  const auto refuse = [](const auto&... what) {
    throw Mismatch(StrCat("the drafter ", what...));
  };
  if (target.architecture != "gemma4") {
    refuse("guesses for models of Gemma 4, found one of architecture ",
           target.architecture, " to guess for");
  }
  const auto check = [&](const char* what, auto found, auto expected) {
    if (found == expected) return;
    refuse("is for a model of ", what, " ", found, ", found one of ", expected,
           " to guess for");
  };
  check("hidden_size", drafter.target_hidden, target.hidden_size);
  check("vocab_size", drafter.vocab_size, target.vocab_size);
  const std::vector<size_t> read = LayersRead(drafter, target);
  for (size_t i = 0; i < read.size(); ++i) {
    const LayerConfig& layer = drafter.layers[i];
    if (read[i] >= target.num_layers()) {
      refuse("reads the keys of ", NameOf(layer.kind),
             " layers, of which the model to guess for has none");
    }
    const LayerConfig& other = target.layers[read[i]];
    const auto same = [&](const char* what, auto found, auto expected) {
      if (found == expected) return;
      refuse("reads ", NameOf(layer.kind), " layers of ", what, " ", found,
             ", found ", expected, " in the model to guess for");
    };
    same("kv_heads", layer.kv_heads, other.kv_heads);
    same("head_dim", layer.head_dim, other.head_dim);
    same("sliding_window", layer.window, other.window);
    same("rope_dim", layer.rope_dim, other.rope_dim);
    same("still_pairs", layer.still_pairs, other.still_pairs);
    same("rope_base", layer.rope_base, other.rope_base);
    same("rope_factor", layer.rope_factor, other.rope_factor);
  }
}

DraftPass::DraftPass(const Model& drafter, const Model& target,
                     ThreadPool& pool)
    : drafter_(drafter),
      target_(target),
      pool_(pool),
      attention_(drafter.config, LayersRead(drafter.config, target.config)),
      head_(drafter.config, drafter.weights, pool) {}

void DraftPass::NormInput(const FloatVector& norm, size_t row) {
  RmsNorm(x(row), norm.data(), drafter_.config.rms_epsilon, hidden(),
          input_.row(row));
  input_.Quantize(row);
}

void DraftPass::Run(std::span<const Row> rows) {
  if (rows.empty()) return;
  const size_t count = rows.size();
  slices_.clear();
  views_.clear();
  rows_.clear();
  views_.reserve(count);
  for (const Row& row : rows) {
    // One row at the position behind what is held.
    KvStepView& view = views_.emplace_back();
    view.groups = row.view->groups;
    view.begin = row.view->end;
    view.end = row.view->end + 1;
    rows_.push_back({slices_.size(), view.begin, row.token});
    slices_.push_back({{&row.token, 1}, &view, row.layout, {}});
  }
  const StepWork work(slices_, rows_, pool_);
  Embed(rows, work);
  for (size_t i = 0; i < drafter_.config.num_layers(); ++i) RunLayer(i, work);

  const DrafterWeights& weights = drafter_.weights.drafter;
  // What is read is little, and there are few rows: 16-bit precision costs
  // nothing.
  last_.Resize(count, hidden(), kFinePlanes);
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    RmsNorm(x(row), drafter_.weights.final_norm.data(),
            drafter_.config.rms_epsilon, hidden(), last_.row(row));
  });
  const size_t width = drafter_.config.target_hidden;
  next_.EnsureSize(count * width);
  Multiply(StepPart::kHead, weights.post_projection, last_, pool_, products_,
           next_.data());
  for (size_t row = 0; row < count; ++row) {
    std::copy_n(next_.data() + row * width, width, rows[row].next);
  }
  if (drafter_.config.num_centroids != 0) return HeadOfClusters(rows);
  std::vector<OutputHead::Row> outputs;
  for (size_t row = 0; row < count; ++row) {
    outputs.push_back(
        {x(row), rows[row].logits, rows[row].largest, rows[row].count});
  }
  head_.Compute(outputs);
}

void DraftPass::Embed(std::span<const Row> rows, const StepWork& work) {
  const size_t width = drafter_.config.target_hidden;
  const size_t count = rows.size();
  x_.EnsureSize(count * hidden());
  projected_.EnsureSize(count * hidden());
  input_.Resize(count, hidden());
  pair_.Resize(count, 2 * width, kFinePlanes);
  attention_.Begin(work);
  target_.weights.embedding.RequireSound(pool_);
  const PackedView embedding = target_.weights.embedding.view();
  work.ForRows(StepPart::kEmbedding, [&](size_t row) {
    float* const pair = pair_.row(row);
    UnpackRow(embedding, static_cast<size_t>(rows[row].token), pair);
    Scale(target_.config.embedding_scale, width, pair);
    std::copy_n(rows[row].state, width, pair + width);
    attention_.Rotations(work, row);
  });
  Multiply(StepPart::kEmbedding, drafter_.weights.drafter.pre_projection, pair_,
           pool_, products_, x_.data());
}

void DraftPass::RunLayer(size_t i, const StepWork& work) {
  const LayerWeights& layer = drafter_.weights.layers[i];
  const float epsilon = drafter_.config.rms_epsilon;
  work.ForRows(StepPart::kNorms,
               [&](size_t row) { NormInput(layer.attn_norm, row); });
  Activations& attended = attention_.Mix(layer, i, input_, work);
  work.MatMuls(StepPart::kAttentionOutput,
               {{&layer.o, &attended, projected_.data()}});
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    AddRmsNorm(projected_.data() + row * hidden(), layer.post_attn_norm.data(),
               epsilon, hidden(), x(row));
    NormInput(layer.ffn_norm, row);
  });
  feed_forward_.Compute(layer, drafter_.config.layers[i].sparsity_cutoff,
                        input_, projected_.data(), work);
  work.ForRows(StepPart::kNorms, [&](size_t row) {
    AddRmsNorm(projected_.data() + row * hidden(), layer.post_ffn_norm.data(),
               epsilon, hidden(), x(row));
    Scale(layer.output_scale[0], hidden(), x(row));
  });
}

void DraftPass::HeadOfClusters(std::span<const Row> rows) {
  const ModelConfig& config = drafter_.config;
  const Weights& weights = drafter_.weights;
  const PackedMatrix& matrix = weights.output_head();
  const size_t clusters = config.num_centroids, used = config.centroids_used;
  const size_t size = config.vocab_size / clusters;
  const size_t count = rows.size();
  scores_.EnsureSize(count * clusters);
  Multiply(StepPart::kHead, weights.drafter.centroids, last_, pool_, products_,
           scores_.data());
  chosen_.resize(count * clusters);
  pool_.Run(count, [&](size_t row, size_t) {
    float* const scores = scores_.data() + row * clusters;
    uint32_t* const chosen = chosen_.data() + row * clusters;
    ChooseLargest({scores, clusters}, used, {chosen, clusters});
    if (rows[row].largest != nullptr) return;
    std::fill_n(rows[row].logits, config.vocab_size,
                -std::numeric_limits<float>::infinity());
  });
  matrix.RequireSound(pool_);
  pool_.Enter(StepPart::kHead);
  const bool planes = last_.OutputRows(matrix.type) > count;
  const size_t stride = (planes ? kFinePlanes : 1) * size;
  clusters_.EnsureSize(count * used * stride);
  const size_t cluster_bytes =
      size / kRowGroup * GroupBytes(matrix.type, matrix.cols);
  pool_.Run(count * used, [&](size_t task, size_t thread) {
    const size_t row = task / used;
    const size_t cluster = chosen_[row * clusters + task % used];
    const PackedView view{matrix.type, size, matrix.cols,
                          matrix.data + cluster * cluster_bytes};
    float* const products = clusters_.data() + task * stride;
    const auto multiply = [&](size_t plane_row, float* out) {
      const MatMulInput input{last_.row(row), hidden(),
                              last_.quantized(plane_row), 1};
      MatMul(view, input, 0, NumGroups(size), pool_.scratch(thread), out, size);
    };
    multiply(row, products);
    if (planes) {
      multiply(count + row, products + size);
      Add(products + size, size, products);
    }
    if (rows[row].largest != nullptr) return;
    const float* const tokens =
        weights.drafter.ordering.data() + cluster * size;
    for (size_t i = 0; i < size; ++i) {
      rows[row].logits[static_cast<size_t>(tokens[i])] = products[i];
    }
  });
  for (size_t row = 0; row < count; ++row) {
    if (rows[row].largest == nullptr) continue;
    ListLargest(rows[row], chosen_.data() + row * clusters,
                clusters_.data() + row * used * stride, stride);
  }
}

// Of the products of the chosen clusters, `stride` apart.
void DraftPass::ListLargest(const Row& row, const uint32_t* chosen,
                            const float* products, size_t stride) const {
  const ModelConfig& config = drafter_.config;
  const size_t size = config.vocab_size / config.num_centroids;
  std::vector<float> logits;
  logits.reserve(config.centroids_used * size);
  for (size_t i = 0; i < config.centroids_used; ++i) {
    const float* const part = products + i * stride;
    logits.insert(logits.end(), part, part + size);
  }
  TokenList found;
  TokensFrom(logits.data(), logits.size(),
             FloorOfLargest(logits.data(), logits.size(), row.count), found);
  std::vector<std::pair<int32_t, float>> tokens;
  tokens.reserve(found.ids.size());
  for (size_t i = 0; i < found.ids.size(); ++i) {
    const auto at = static_cast<size_t>(found.ids[i]);
    const size_t token = chosen[at / size] * size + at % size;
    tokens.emplace_back(
        static_cast<int32_t>(drafter_.weights.drafter.ordering[token]),
        found.logits[i]);
  }
  ListById(tokens, *row.largest);
}

}  // namespace gkv
