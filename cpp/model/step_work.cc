#include "model/step_work.h"

#include <algorithm>
#include <iterator>

#include "model/group_tasks.h"

namespace gkv {
namespace {

// The most bytes of a stretch of one of a pair of products. Both stretches, the
// weights and the rows then stay in the second-level cache until they are used.
constexpr size_t kMaxPairBytes = 64 * 1024;

static_assert(kMatMulScratchBytes <= ThreadPool::kScratchBytes);

// Returns the most groups of such a stretch, an even number.
size_t MaxGroupsOfPair(size_t rows) {
  const size_t bytes = std::max<size_t>(1, rows) * kRowGroup * sizeof(float);
  return 2 * std::max<size_t>(1, kMaxPairBytes / bytes / 2);
}

// Runs one loop over the groups of all products; part_of(i) is the i-th
// MatMulPart.
template <typename PartOf>
void RunParts(size_t count, const PartOf& part_of, ThreadPool& pool) {
  size_t total_groups = 0, rows = 0;
  for (size_t i = 0; i < count; ++i) {
    const MatMulPart part = part_of(i);
    total_groups += NumGroups(part.weights.rows);
    rows = std::max(rows, part.input.rows);
  }
  const GroupTasks tasks(total_groups, rows, pool.num_threads());
  pool.Run(tasks.count(), [&](size_t task, size_t thread) {
    auto [begin, end] = tasks.RangeOf(task);
    for (size_t i = 0; i < count && end > 0; ++i) {
      const MatMulPart part = part_of(i);
      const size_t groups = NumGroups(part.weights.rows);
      if (begin < groups && begin < end) {
        MatMul(part.weights, part.input, begin, std::min(end, groups),
               pool.scratch(thread), part.out, part.stride);
      }
      begin = begin > groups ? begin - groups : 0;
      end = end > groups ? end - groups : 0;
    }
  });
}

// The inputs of some products. Those that have many rows are laid out for their
// kernels, once for all tasks. If there are more kinds of them than places,
// each task lays out the others for itself, with the same bits.
class InputLayouts {
 public:
  InputLayouts(std::span<const MatMulJob> jobs, ThreadPool& pool) {
    for (const MatMulJob& job : jobs) Add(job);
    size_t tiles = 0;
    for (size_t i = 0; i < count_; ++i) tiles += places_[i].layout.tiles;
    if (tiles == 0) return;
    pool.Run(tiles, [&](size_t tile, size_t) {
      const Place* place = places_;
      for (; tile >= place->layout.tiles; ++place) tile -= place->layout.tiles;
      LayOutRows(place->type, place->input->input(place->type),
                 place->input->cols, tile, place->out);
    });
  }

  // Returns the job's input, with its layout if there is one.
  MatMulInput InputOf(const MatMulJob& job) const {
    MatMulInput input = job.input->input(job.weights->type);
    for (size_t i = 0; i < count_; ++i) {
      if (IsFor(places_[i], job)) input.laid_out = places_[i].out;
    }
    return input;
  }

 private:
  struct Place {
    TensorType type;
    Activations* input;
    RowLayout layout;
    uint8_t* out;
  };

  static bool IsFor(const Place& place, const MatMulJob& job) {
    return place.input == job.input && place.type == job.weights->type;
  }

  void Add(const MatMulJob& job) {
    const TensorType type = job.weights->type;
    const RowLayout layout =
        LayoutOfRows(type, job.input->OutputRows(type), job.input->cols);
    if (layout.tiles == 0) return;
    size_t of_input = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (IsFor(places_[i], job)) return;
      if (places_[i].input == job.input) ++of_input;
    }
    if (count_ == std::size(places_) ||
        of_input == std::size(job.input->laid_out)) {
      return;
    }
    AlignedBuffer<uint8_t>& buffer = job.input->laid_out[of_input];
    buffer.EnsureSize(layout.bytes);
    places_[count_++] = {type, job.input, layout, buffer.data()};
  }

  Place places_[3];
  size_t count_ = 0;
};

}  // namespace

void StepWork::MatMuls(StepPart part,
                       std::initializer_list<MatMulJob> jobs) const {
  for (const MatMulJob& job : jobs) job.weights->RequireSound(pool_);
  Enter(part);
  const InputLayouts layouts({jobs.begin(), jobs.size()}, pool_);
  RunParts(
      jobs.size(),
      [&](size_t i) {
        const MatMulJob& job = jobs.begin()[i];
        return MatMulPart{job.weights->view(), layouts.InputOf(job), job.out,
                          job.weights->rows};
      },
      pool_);
}

void StepWork::MatMulPair(
    StepPart part, const PackedMatrix& a, const PackedMatrix& b,
    Activations& input, AlignedBuffer<float>& products,
    const std::function<void(const PairStretch&)>& fn) const {
  a.RequireSound(pool_);
  b.RequireSound(pool_);
  Enter(part);
  const size_t groups = NumGroups(a.rows);
  const GroupTasks tasks(groups, input.rows, pool_.num_threads(),
                         MaxGroupsOfPair(input.rows));
  // Rows of whole products are so far apart, often by a power of two, that the
  // same columns of all rows would share few sets of a cache.
  const size_t stride = tasks.longest() * kRowGroup;
  const size_t size = input.rows * stride;
  products.EnsureSize(pool_.num_threads() * 2 * size);
  const MatMulJob jobs[] = {{&a, &input, nullptr}, {&b, &input, nullptr}};
  const InputLayouts layouts(jobs, pool_);
  pool_.Run(tasks.count(), [&](size_t task, size_t thread) {
    const auto [begin, end] = tasks.RangeOf(task);
    float* out = products.data() + thread * 2 * size;
    const PairStretch stretch{begin * kRowGroup,
                              std::min(a.rows, end * kRowGroup), stride, out,
                              out + size};
    for (const MatMulJob& job : jobs) {
      PackedView weights = job.weights->view();
      weights.data += begin * GroupBytes(weights.type, weights.cols);
      weights.rows = stretch.end - stretch.begin;
      MatMul(weights, layouts.InputOf(job), 0, end - begin,
             pool_.scratch(thread), out, stride);
      out += size;
    }
    fn(stretch);
  });
}

void StepWork::MatMuls(StepPart part, std::span<const MatMulPart> parts) const {
  Enter(part);
  RunParts(
      parts.size(), [&](size_t i) -> const MatMulPart& { return parts[i]; },
      pool_);
}

void Multiply(StepPart part, const PackedMatrix& weights, Activations& input,
              ThreadPool& pool, AlignedBuffer<float>& products, float* out) {
  for (size_t row = 0; row < input.rows; ++row) input.Quantize(row);
  const size_t cols = weights.rows;
  products.EnsureSize(input.OutputRows(weights.type) * cols);
  StepWork({}, {}, pool).MatMuls(part, {{&weights, &input, products.data()}});
  std::copy_n(products.data(), input.rows * cols, out);
  for (size_t row = input.rows; row < input.OutputRows(weights.type); ++row) {
    Add(products.data() + row * cols, cols, out + (row - input.rows) * cols);
  }
}

}  // namespace gkv
