#include "model/step_work.h"

#include <algorithm>

namespace gkv {
namespace {

// Weight groups are handed out in a few portions per thread, so that a thread
// that is held up by the system does not hold up the others; a portion is long
// enough for the kernels to prefetch within it.
constexpr size_t kMinGroupsPerTask = 16;
// Of so many rows the products take longer than reading the weights, and the
// end of a loop, where threads wait for the last portion, longer than a start.
constexpr size_t kManyRows = 64;
constexpr size_t kMinGroupsOfManyRows = 8;
constexpr size_t kMaxPortionsPerThread = 16;

size_t GroupsOfTask(size_t groups, size_t rows, size_t threads) {
  const size_t min_groups =
      rows < kManyRows ? kMinGroupsPerTask : kMinGroupsOfManyRows;
  const size_t portions = std::clamp<size_t>(groups / (threads * min_groups), 1,
                                             kMaxPortionsPerThread);
  // Kernels take groups in pairs.
  return RoundUp(CeilDiv(groups, threads * portions), 2);
}

// One loop over the groups of all products; part_of(i) is the i-th MatMulPart.
template <typename PartOf>
void RunParts(size_t count, const PartOf& part_of, ThreadPool& pool) {
  size_t total_groups = 0, rows = 0;
  for (size_t i = 0; i < count; ++i) {
    const MatMulPart part = part_of(i);
    total_groups += NumGroups(part.weights.rows);
    rows = std::max(rows, part.input.rows);
  }
  const size_t per_task = GroupsOfTask(total_groups, rows, pool.num_threads());
  pool.Run(CeilDiv(total_groups, per_task), [&](size_t task, size_t) {
    size_t begin = task * per_task;
    size_t end = std::min(total_groups, begin + per_task);
    for (size_t i = 0; i < count && end > 0; ++i) {
      const MatMulPart part = part_of(i);
      const size_t groups = NumGroups(part.weights.rows);
      if (begin < groups && begin < end) {
        MatMul(part.weights, part.input, begin, std::min(end, groups),
               part.out, part.stride);
      }
      begin = begin > groups ? begin - groups : 0;
      end = end > groups ? end - groups : 0;
    }
  });
}

}  // namespace

size_t StepWork::GroupsPerTask(size_t groups, size_t rows) const {
  return GroupsOfTask(groups, rows, pool_.num_threads());
}

void StepWork::MatMuls(StepPart part,
                       std::initializer_list<MatMulJob> jobs) const {
  for (const MatMulJob& job : jobs) job.weights->RequireSound(pool_);
  Enter(part);
  RunParts(
      jobs.size(),
      [&](size_t i) {
        const MatMulJob& job = jobs.begin()[i];
        return MatMulPart{job.weights->view(),
                          job.input->input(job.weights->type), job.out,
                          job.weights->rows};
      },
      pool_);
}

void StepWork::MatMuls(StepPart part,
                       std::span<const MatMulPart> parts) const {
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
  StepWork({}, {}, pool)
      .MatMuls(part, {{&weights, &input, products.data()}});
  std::copy_n(products.data(), input.rows * cols, out);
  for (size_t row = input.rows; row < input.OutputRows(weights.type); ++row) {
    Add(products.data() + row * cols, cols, out + (row - input.rows) * cols);
  }
}

}  // namespace gkv
