#include "model/step_work.h"

namespace gkv {
namespace {

// Weight groups are handed out in a few portions per thread, so that a thread
// that is held up by the system does not hold up the others; a portion is long
// enough for the kernels to prefetch within it.
constexpr size_t kMinGroupsPerTask = 16;
constexpr size_t kMaxPortionsPerThread = 16;

}  // namespace

void StepWork::MatMuls(std::initializer_list<MatMulJob> jobs) const {
  size_t total_groups = 0;
  for (const MatMulJob& job : jobs) {
    job.weights->RequireSound(pool_);
    total_groups += NumGroups(job.weights->rows);
  }
  const size_t threads = pool_.num_threads();
  const size_t portions = std::clamp<size_t>(
      total_groups / (threads * kMinGroupsPerTask), 1, kMaxPortionsPerThread);
  // Kernels take groups in pairs.
  const size_t per_task =
      RoundUp(CeilDiv(total_groups, threads * portions), 2);
  pool_.Run(CeilDiv(total_groups, per_task), [&](size_t task, size_t) {
    size_t begin = task * per_task;
    size_t end = std::min(total_groups, begin + per_task);
    for (const MatMulJob& job : jobs) {
      const size_t groups = NumGroups(job.weights->rows);
      if (begin < groups && begin < end) {
        MatMul(job.weights->view(), job.input->input(job.weights->type), begin,
               std::min(end, groups), job.out, job.weights->rows);
      }
      begin = begin > groups ? begin - groups : 0;
      end = end > groups ? end - groups : 0;
    }
  });
}

}  // namespace gkv
