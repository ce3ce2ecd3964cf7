#include "model/output_head.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/rounding.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

namespace gkv {
namespace {

// The head's input alone has two planes: what it loses goes straight into the
// logits, and prefill does not pay for it. On the 270M model, mean KL to the
// float32 reference over 3,218 positions of prose, how many of the reference's
// 616 clear choices (margin >= 0.5) come out otherwise, and prefill of 512:
//   one plane everywhere        1.77e-3   1   4,100 tokens/s
//   two for the head            1.39e-3   0   4,100
//   and for down                0.97e-3   0   3,500
//   and for q, k, v             0.60e-3   0   3,160
constexpr size_t kPlanes = 2;

// Products that a thread holds before it sums up the planes: they stay in its
// cache.
constexpr size_t kStretchFloats = size_t{1} << 16;
// Long enough for the kernels to prefetch within it.
constexpr size_t kMinStretchGroups = 16;

// Of a single row the second plane costs nothing: reading the weights does.
// (270M, greedy decode of 2 to 5 conversations: 1.10, 1.12, 1.03, 1.58 times as
// fast as with both planes.)
constexpr size_t kMinScreenedRows = 2;

// Room for the rounding of the products that a bound is for: their terms'
// magnitudes sum up to no more than the bound itself (Cauchy-Schwarz), so the
// error of a sum of n terms is below n * 2^-24 of it.
constexpr float kBoundSlack = 1.01f;

// Logits that a soft cap has brought as close as this, in units of the cap, may
// be in another order than they were: twice what its tanh errs by, at most 4
// ulp, and the rounding of a division and a product, with room.
constexpr double kCapSlack = 1e-5;

// Below it no product can be the largest behind the cap, if one is `least`.
float FloorUnderSoftCap(float cap, float least) {
  if (cap <= 0) return least;
  const double capped = std::tanh(static_cast<double>(least) / cap);
  // Far below 0 there is none: the order of all is open.
  return static_cast<float>(cap * std::atanh(capped - kCapSlack));
}

}  // namespace

// One task's part of the vocabulary.
struct OutputHead::Stretch {
  size_t first_group;
  size_t begin;        // first token
  size_t count;        // tokens
  const float* parts;  // [input rows, width]
  size_t width;
};

OutputHead::OutputHead(const ModelConfig& config, const Weights& weights,
                       ThreadPool& pool)
    : config_(config),
      weights_(weights),
      matrix_(weights.output_head()),
      pool_(pool) {}

void OutputHead::Compute(std::span<const Row> rows) {
  if (rows.empty()) return;
  matrix_.RequireSound(pool_);
  Prepare(rows);
  const auto screened = static_cast<size_t>(std::count_if(
      rows_.begin(), rows_.end(), [](const Row& r) { return r.argmax_only; }));
  const bool screens = UsesQuantizedActivations(matrix_.type) &&
                       screened >= kMinScreenedRows;
  const size_t both = screens ? rows_.size() - screened : rows_.size();
  pool_.Enter(StepPart::kHead);
  if (screens) Screen();
  Multiply(both);
  if (!screens) return;
  pool_.Run(screened, [&](size_t i, size_t) { Complete(both + i); });
}

// Norms and quantizes the rows.
void OutputHead::Prepare(std::span<const Row> rows) {
  pool_.Enter(StepPart::kNorms);
  rows_.assign(rows.begin(), rows.end());
  std::stable_partition(rows_.begin(), rows_.end(),
                        [](const Row& row) { return !row.argmax_only; });
  input_.Resize(rows_.size(), config_.hidden_size, kPlanes);
  const auto prepare = [&](size_t row, size_t) {
    RmsNorm(rows_[row].x, weights_.final_norm.data(), config_.rms_epsilon,
            config_.hidden_size, input_.row(row));
    input_.Quantize(row);
  };
  if (rows_.size() == 1) {
    prepare(0, 0);
  } else {
    pool_.Run(rows_.size(), prepare);
  }
}

void OutputHead::Screen() {
  if (group_norms_.empty()) NormGroups();
  group_max_.EnsureSize(rows_.size() * NumGroups(matrix_.rows));
  second_norms_.resize(rows_.size());
  for (size_t row = 0; row < rows_.size(); ++row) {
    second_norms_[row] =
        rows_[row].argmax_only ? kBoundSlack * SecondPlaneNorm(row) : 0;
  }
}

// The largest Euclidean norm of each group's weight rows, rounded up.
void OutputHead::NormGroups() {
  constexpr size_t kGroupsOfTask = 64;
  std::vector<float> norms(NumGroups(matrix_.rows));
  pool_.Run(CeilDiv(norms.size(), kGroupsOfTask), [&](size_t task, size_t) {
    const size_t begin = task * kGroupsOfTask;
    const size_t end = std::min(norms.size(), begin + kGroupsOfTask);
    for (size_t group = begin; group < end; ++group) {
      float squares[kRowGroup];
      SquaredNorms(matrix_.view(), group, squares);
      float largest = 0;
      for (const float sum : squares) {
        // Not std::max: a NaN must not get lost.
        if (!(sum <= largest)) largest = sum;
      }
      norms[group] = std::sqrt(largest) * (1 + 1e-6f);
    }
  });
  group_norms_ = std::move(norms);
}

float OutputHead::SecondPlaneNorm(size_t row) {
  const QuantizedRows plane = input_.quantized(rows_.size() + row);
  double sum = 0;
  for (size_t block = 0; block < input_.cols / kQuantBlock; ++block) {
    int32_t squares = 0;
    for (size_t i = 0; i < kQuantBlock; ++i) {
      const int32_t value = plane.values[block * kQuantBlock + i];
      squares += value * value;
    }
    const double scale = plane.scales[block];
    sum += scale * scale * squares;
  }
  return static_cast<float>(std::sqrt(sum) * (1 + 1e-6));
}

// Products with the first plane of all rows and the second one of the first
// `both`, in stretches of the vocabulary.
void OutputHead::Multiply(size_t both) {
  MatMulInput input = input_.input(matrix_.type);
  // The second plane's rows follow the first one's, in the same order.
  if (input.rows > rows_.size()) input.rows = rows_.size() + both;
  const size_t groups = NumGroups(matrix_.rows);
  const size_t stretch = std::clamp<size_t>(
      kStretchFloats / (input.rows * kRowGroup), kMinStretchGroups,
      std::max(kMinStretchGroups, groups / (4 * pool_.num_threads())));
  const size_t width = stretch * kRowGroup;
  const size_t stride = input.rows * width;
  parts_.EnsureSize(pool_.num_threads() * stride);
  const size_t group_bytes = GroupBytes(matrix_.type, matrix_.cols);
  pool_.Run(CeilDiv(groups, stretch), [&](size_t task, size_t thread) {
    const size_t begin = task * width;
    const size_t count = std::min(width, matrix_.rows - begin);
    const PackedView view{matrix_.type, count, matrix_.cols,
                          matrix_.data + task * stretch * group_bytes};
    float* parts = parts_.data() + thread * stride;
    MatMul(view, input, 0, NumGroups(count), parts, width);
    for (size_t row = 0; row < rows_.size(); ++row) {
      StoreRow({task * stretch, begin, count, parts, width}, row, both);
    }
  });
}

void OutputHead::StoreRow(const Stretch& s, size_t row, size_t both) {
  const float* first = s.parts + row * s.width;
  float* out = rows_[row].logits + s.begin;
  std::memcpy(out, first, s.count * sizeof(float));
  if (row >= both) {
    float* largest = group_max_.data() + row * NumGroups(matrix_.rows);
    for (size_t i = 0; i < s.count; i += kRowGroup) {
      float max = -std::numeric_limits<float>::infinity();
      for (size_t j = i; j < std::min(s.count, i + kRowGroup); ++j) {
        max = first[j] > max ? first[j] : max;
      }
      largest[s.first_group + i / kRowGroup] = max;
    }
    return;
  }
  if (input_.OutputRows(matrix_.type) > rows_.size()) {
    Add(s.parts + (rows_.size() + row) * s.width, s.count, out);
  }
  if (config_.final_soft_cap > 0) SoftCap(config_.final_soft_cap, s.count, out);
}

// Adds the second plane to the groups that may hold the row's largest logit.
// No other logit reaches it: with m the group's largest product and b its
// bound, m + b is below m' - b' of the group where that is largest, and the
// rounding of sums keeps their order. A soft cap, which all then get, does not
// keep that of logits that it brings together: these are completed, too.
void OutputHead::Complete(size_t row) {
  const size_t groups = NumGroups(matrix_.rows);
  const float* largest = group_max_.data() + row * groups;
  const float norm = second_norms_[row];
  float least = -std::numeric_limits<float>::infinity();
  for (size_t g = 0; g < groups; ++g) {
    least = std::max(least, largest[g] - norm * group_norms_[g]);
  }
  const float cap = config_.final_soft_cap;
  least = FloorUnderSoftCap(cap, least);
  const MatMulInput second{nullptr, 0,
                           input_.quantized(rows_.size() + row), 1};
  const size_t group_bytes = GroupBytes(matrix_.type, matrix_.cols);
  for (size_t g = 0; g < groups; ++g) {
    // Written so that a bound that is no number counts as one that holds.
    if (largest[g] + norm * group_norms_[g] < least) continue;
    const size_t count = std::min(kRowGroup, matrix_.rows - g * kRowGroup);
    const PackedView view{matrix_.type, count, matrix_.cols,
                          matrix_.data + g * group_bytes};
    float added[kRowGroup];
    MatMul(view, second, 0, 1, added, kRowGroup);
    Add(added, count, rows_[row].logits + g * kRowGroup);
  }
  if (cap > 0) SoftCap(cap, matrix_.rows, rows_[row].logits);
}

}  // namespace gkv
