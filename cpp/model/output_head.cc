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
constexpr size_t kHeadPlanes = 2;

// The number of products that a thread holds before it adds up the planes: they
// stay in its cache.
constexpr size_t kStretchFloats = size_t{1} << 16;
// Long enough for the kernels to prefetch within a stretch.
constexpr size_t kMinStretchGroups = 16;
// So many that a thread that is held up does not hold up the others for long.
constexpr size_t kMinStretchesOfThread = 16;
// A task of this many takes a few microseconds.
constexpr size_t kContendersOfTask = 8;

// For a single row the second plane costs nothing: reading the weights does.
// (270M, greedy decode of 2 to 5 conversations: 1.10, 1.12, 1.03, 1.58 times as
// fast as with both planes.)
constexpr size_t kMinScreenedRows = 2;

// Room for the rounding of the products that a bound is for. The magnitudes of
// their terms add up to no more than the bound itself (Cauchy-Schwarz), so the
// error of a sum of n terms is below n * 2^-24 of it.
constexpr float kBoundSlack = 1.01f;

// Logits that a soft cap has brought as close as this, in units of the cap, may
// have another order than before. This is twice the error of its tanh, at most
// 4 ulp, and the rounding of a division and a product, with some room.
constexpr double kCapSlack = 1e-5;

// Returns a floor. After the cap no product below the floor reaches one of
// `least`.
float FloorUnderSoftCap(float cap, float least) {
  if (cap <= 0) return least;
  const double capped = std::tanh(static_cast<double>(least) / cap) - kCapSlack;
  // Far below 0 the cap may put logits in any order.
  if (!(capped > -1)) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(cap * std::atanh(capped));
}

}  // namespace

// One task's part of the vocabulary.
struct OutputHead::Stretch {
  size_t first_group;
  size_t begin;  // first token
  size_t count;  // tokens
  float* parts;  // [input rows, width]
  size_t width;
  size_t both;  // rows whose second plane was multiplied, too

  const float* row(size_t r) const { return parts + r * width; }
  float* row(size_t r) { return parts + r * width; }
};

OutputHead::OutputHead(const ModelConfig& config, const Weights& weights,
                       ThreadPool& pool)
    : config_(config),
      weights_(weights),
      matrix_(weights.output_head()),
      pool_(pool) {}

void OutputHead::Compute(std::span<const Row> rows) {
  num_contenders_ = 0;
  if (rows.empty()) return;
  matrix_.RequireSound(pool_);
  Prepare(rows);
  const auto whole = static_cast<size_t>(std::count_if(
      rows_.begin(), rows_.end(), [](const Row& r) { return !r.largest; }));
  const bool screens = UsesQuantizedActivations(matrix_.type) &&
                       rows_.size() - whole >= kMinScreenedRows;
  pool_.Enter(StepPart::kHead);
  second_norms_.clear();
  if (screens) Screen(whole);
  Multiply(whole, screens ? whole : rows_.size());
  if (whole < rows_.size()) ListLargest(whole);
}

// Norms and quantizes the rows.
void OutputHead::Prepare(std::span<const Row> rows) {
  pool_.Enter(StepPart::kNorms);
  rows_.assign(rows.begin(), rows.end());
  std::stable_partition(rows_.begin(), rows_.end(),
                        [](const Row& row) { return !row.largest; });
  input_.Resize(rows_.size(), config_.hidden_size, kHeadPlanes);
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

// Computes the norms that bounds are made of, for the rows from `whole` on.
void OutputHead::Screen(size_t whole) {
  if (group_norms_.empty()) NormGroups();
  second_norms_.resize(rows_.size());
  for (size_t row = whole; row < rows_.size(); ++row) {
    second_norms_[row] = kBoundSlack * SecondPlaneNorm(row);
  }
}

// Computes the largest Euclidean norm of each group's weight rows, rounded up.
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
        // Not std::max: a NaN must not get lost, here or in the next rows.
        if (largest == largest && !(sum <= largest)) largest = sum;
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

// Multiplies the first plane of all rows, and the second one of the first
// `both` rows, in stretches of the vocabulary. For rows from `whole` on it
// keeps only the largest product of each group.
void OutputHead::Multiply(size_t whole, size_t both) {
  MatMulInput input = input_.input(matrix_.type);
  // The second plane's rows follow the first one's, in the same order.
  if (input.rows > rows_.size()) input.rows = rows_.size() + both;
  const size_t groups = NumGroups(matrix_.rows);
  const size_t stretch = std::clamp<size_t>(
      kStretchFloats / (input.rows * kRowGroup), kMinStretchGroups,
      std::max(kMinStretchGroups,
               groups / (kMinStretchesOfThread * pool_.num_threads())));
  const size_t width = stretch * kRowGroup;
  const size_t stride = input.rows * width;
  parts_.EnsureSize(pool_.num_threads() * stride);
  group_max_.EnsureSize((rows_.size() - whole) * groups);
  const size_t group_bytes = GroupBytes(matrix_.type, matrix_.cols);
  pool_.Run(CeilDiv(groups, stretch), [&](size_t task, size_t thread) {
    const size_t begin = task * width;
    const size_t count = std::min(width, matrix_.rows - begin);
    const PackedView view{matrix_.type, count, matrix_.cols,
                          matrix_.data + task * stretch * group_bytes};
    Stretch part{task * stretch, begin, count, parts_.data() + thread * stride,
                 width,          both};
    MatMul(view, input, 0, NumGroups(count), pool_.scratch(thread), part.parts,
           width);
    for (size_t row = 0; row < rows_.size(); ++row) {
      if (row < whole) {
        StoreRow(part, row);
      } else {
        NoteMaxima(part, row, group_max_.data() + (row - whole) * groups);
      }
    }
  });
}

bool OutputHead::HasBothPlanes(const Stretch& s, size_t row) const {
  return row < s.both && UsesQuantizedActivations(matrix_.type);
}

void OutputHead::StoreRow(const Stretch& s, size_t row) const {
  float* const out = rows_[row].logits + s.begin;
  std::memcpy(out, s.row(row), s.count * sizeof(float));
  if (HasBothPlanes(s, row)) Add(s.row(rows_.size() + row), s.count, out);
  if (config_.final_soft_cap > 0) SoftCap(config_.final_soft_cap, s.count, out);
}

void OutputHead::NoteMaxima(Stretch& s, size_t row, float* maxima) const {
  if (HasBothPlanes(s, row)) {
    Add(s.row(rows_.size() + row), s.count, s.row(row));
  }
  const float* const products = s.row(row);
  const size_t groups = s.count / kRowGroup;
  MaximaOfGroups(products, kRowGroup, groups, maxima + s.first_group);
  const size_t rest = s.count % kRowGroup;
  if (rest == 0) return;
  maxima[s.first_group + groups] =
      ArgMax(products + groups * kRowGroup, rest).logit;
}

// Lists the largest logits of the rows from `whole` on.
//
// A row's leaders are the groups with the largest products. The `count`-th
// largest of their logits is a floor: `count` logits are not below it. If a
// group's largest product and its bound add up to less, no logit of the group
// is among the largest, since the rounding of sums keeps their order. The soft
// cap, which all logits then get, does not keep the order of logits that it
// brings close to each other, so these stay in the race. The groups that stay
// are the chasers. If the products are those of both planes, they are leaders,
// and there are no chasers.
void OutputHead::ListLargest(size_t whole) {
  const size_t groups = NumGroups(matrix_.rows);
  const size_t rows = rows_.size() - whole;
  const bool screened = !second_norms_.empty();
  PairPlanes(whole);
  if (races_.size() < rows) races_.resize(rows);
  const std::span<Race> races(races_.data(), rows);
  for (size_t i = 0; i < rows; ++i) {
    Race& race = races[i];
    race.row = whole + i;
    const float* maxima = group_max_.data() + i * groups;
    race.floor = FloorOfLargest(maxima, groups, rows_[race.row].count);
    // No chasers follow, so the leaders are all that a cap may bring to the
    // top.
    if (!screened) {
      race.floor = FloorUnderSoftCap(config_.final_soft_cap, race.floor);
    }
    TokensFrom(maxima, groups, race.floor, race.leaders.groups);
    race.chasers.groups.ids.clear();
  }
  Complete(whole, races, &Race::leaders);
  if (screened) {
    pool_.Run(rows, [&](size_t i, size_t) {
      BoundChasers(races[i], group_max_.data() + i * groups);
    });
    for (size_t i = 0; i < rows; ++i) {
      TokensFrom(group_max_.data() + i * groups, groups,
                 FloorOfChasers(races[i]), races[i].chasers.groups);
    }
  }
  Complete(whole, races, &Race::chasers);
  for (Race& race : races) List(race);
}

// Copies the planes of each row from `whole` on next to each other, so that
// both are multiplied at once.
void OutputHead::PairPlanes(size_t whole) {
  if (!UsesQuantizedActivations(matrix_.type)) return;
  const size_t rows = rows_.size() - whole;
  pairs_.Resize(kHeadPlanes * rows, input_.cols);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t plane = 0; plane < kHeadPlanes; ++plane) {
      pairs_.CopyRow(kHeadPlanes * i + plane, input_,
                     plane * rows_.size() + whole + i, true);
    }
  }
}

// Replaces the largest product of each group by what none of its logits
// exceeds, or by -inf if the group is a leader.
void OutputHead::BoundChasers(const Race& race, float* maxima) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float norm = second_norms_[race.row];
  for (size_t g = 0; g < NumGroups(matrix_.rows); ++g) {
    const float most = maxima[g] + norm * group_norms_[g];
    // A bound that is NaN excludes nothing.
    const float bound = most == most ? most : kInfinity;
    maxima[g] = maxima[g] >= race.floor ? -kInfinity : bound;
  }
}

float OutputHead::FloorOfChasers(const Race& race) const {
  const std::vector<float>& logits = race.leaders.logits;
  return FloorUnderSoftCap(
      config_.final_soft_cap,
      FloorOfLargest(logits.data(), logits.size(), rows_[race.row].count));
}

// Computes the uncapped logits of the groups of all races.
void OutputHead::Complete(size_t whole, std::span<Race> races,
                          Contenders Race::*which) {
  contenders_.clear();
  for (Race& race : races) {
    Contenders& those = race.*which;
    const size_t count = those.groups.ids.size();
    those.logits.resize(count * kRowGroup);
    for (size_t i = 0; i < count; ++i) {
      contenders_.push_back({race.row, static_cast<size_t>(those.groups.ids[i]),
                             those.logits.data() + i * kRowGroup});
    }
  }
  const size_t count = contenders_.size();
  num_contenders_ += count;
  pool_.Run(CeilDiv(count, kContendersOfTask), [&](size_t task, size_t thread) {
    const size_t begin = task * kContendersOfTask;
    const size_t end = std::min(count, begin + kContendersOfTask);
    uint8_t* const scratch = pool_.scratch(thread);
    for (size_t i = begin; i < end; ++i) {
      Complete(whole, contenders_[i], scratch);
    }
  });
}

// Computes the uncapped logits of one group; -inf after the last token.
void OutputHead::Complete(size_t whole, const Contender& contender,
                          uint8_t* scratch) {
  const size_t first = contender.group * kRowGroup;
  const size_t count = std::min(kRowGroup, matrix_.rows - first);
  const PackedView view{
      matrix_.type, count, matrix_.cols,
      matrix_.data + contender.group * GroupBytes(matrix_.type, matrix_.cols)};
  float products[kHeadPlanes * kRowGroup];
  if (UsesQuantizedActivations(matrix_.type)) {
    const QuantizedRows pair =
        pairs_.quantized(kHeadPlanes * (contender.row - whole));
    MatMul(view, {nullptr, 0, pair, kHeadPlanes}, 0, 1, scratch, products,
           kRowGroup);
    Add(products + kRowGroup, count, products);
  } else {
    MatMul(view, {input_.row(contender.row), input_.cols, {}, 1}, 0, 1,
           scratch, products, kRowGroup);
  }
  std::fill(products + count, products + kRowGroup,
            -std::numeric_limits<float>::infinity());
  std::copy_n(products, kRowGroup, contender.logits);
}

void OutputHead::Cap(Contenders& those) const {
  const float cap = config_.final_soft_cap;
  if (cap <= 0 || those.logits.empty()) return;
  SoftCap(cap, those.logits.size(), those.logits.data());
  // After the last token there is still -inf.
  const size_t last = static_cast<size_t>(those.groups.ids.back()) * kRowGroup;
  if (matrix_.rows - last >= kRowGroup) return;
  std::fill(those.logits.end() -
                static_cast<std::ptrdiff_t>(kRowGroup - (matrix_.rows - last)),
            those.logits.end(), -std::numeric_limits<float>::infinity());
}

void OutputHead::List(Race& race) {
  const Row& row = rows_[race.row];
  listed_.clear();
  float floor = -std::numeric_limits<float>::infinity();
  for (Contenders* those : {&race.leaders, &race.chasers}) {
    std::vector<float>& logits = those->logits;
    if (logits.empty()) continue;
    Cap(*those);
    // The floor of the leaders holds for all.
    if (those == &race.leaders) {
      floor = FloorOfLargest(logits.data(), logits.size(), row.count);
    }
    TokensFrom(logits.data(), logits.size(), floor, *row.largest);
    for (size_t i = 0; i < row.largest->ids.size(); ++i) {
      const auto at = static_cast<size_t>(row.largest->ids[i]);
      const int32_t group = those->groups.ids[at / kRowGroup];
      listed_.emplace_back(group * static_cast<int32_t>(kRowGroup) +
                               static_cast<int32_t>(at % kRowGroup),
                           row.largest->logits[i]);
    }
  }
  ListById(listed_, *row.largest);
}

}  // namespace gkv
