#ifndef GEMMAKV_MODEL_STEP_WORK_H_
#define GEMMAKV_MODEL_STEP_WORK_H_

#include <algorithm>
#include <cstddef>
#include <initializer_list>

#include "base/thread_pool.h"
#include "model/activations.h"
#include "model/weights/weights.h"

namespace gkv {

// One product of a step: every row of `input` with `weights`.
struct MatMulJob {
  const PackedMatrix* weights;
  Activations* input;
  float* out;  // [input->rows, weights->rows]
};

// How the work of a step is spread over threads: rows and weights are cut into
// independent tasks, and no result depends on the cut.
class StepWork {
 public:
  // Not owned; must outlive this.
  explicit StepWork(ThreadPool& pool) : pool_(pool) {}

  ThreadPool& pool() const { return pool_; }

  // fn(row) for every row, in parallel when there are enough of them.
  template <typename Fn>
  void ForRows(size_t rows, const Fn& fn) const {
    if (rows <= kSerialRows) {
      for (size_t row = 0; row < rows; ++row) fn(row);
      return;
    }
    const size_t tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
    pool_.Run(tasks, [&](size_t task, size_t) {
      const size_t end = std::min(rows, (task + 1) * kRowsPerTask);
      for (size_t row = task * kRowsPerTask; row < end; ++row) fn(row);
    });
  }

  // Several products as one parallel loop.
  void MatMuls(std::initializer_list<MatMulJob> jobs) const;

 private:
  // Row-wise work on so few rows costs less than waking another thread.
  static constexpr size_t kSerialRows = 4;
  static constexpr size_t kRowsPerTask = 8;

  ThreadPool& pool_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_STEP_WORK_H_
