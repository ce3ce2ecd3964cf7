#ifndef GEMMAKV_MODEL_STEP_WORK_H_
#define GEMMAKV_MODEL_STEP_WORK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>

#include "base/aligned_buffer.h"
#include "base/rounding.h"
#include "base/thread_pool.h"
#include "model/activations.h"
#include "model/step.h"
#include "model/weights/weights.h"
#include "ops/elementwise.h"

namespace gkv {

// One product of a step: every row of `input` with `weights`.
struct MatMulJob {
  const PackedMatrix* weights;
  Activations* input;
  float* out;  // [input->rows, weights->rows]
};

// A product of some rows with some groups of a matrix: out [input.rows,
// stride].
struct MatMulPart {
  PackedView weights;
  MatMulInput input;
  float* out;
  size_t stride;
};

// Columns [begin, end) of two products. Those of row m begin at a + m * stride
// and b + m * stride.
struct PairStretch {
  size_t begin;
  size_t end;
  size_t stride;
  float* a;
  float* b;
};

// A position of a step.
struct StepRow {
  size_t slice;
  size_t position;
  int32_t token;
};

// A step that is being computed, and how its work is spread over threads: rows
// and weights are cut into independent tasks, and no result depends on the cut.
class StepWork {
 public:
  // No argument is owned; all must outlive this. Rows come in the order of the
  // slices.
  StepWork(std::span<const SequenceSlice> slices, std::span<const StepRow> rows,
           ThreadPool& pool)
      : slices_(slices), rows_(rows), pool_(pool) {}

  std::span<const SequenceSlice> slices() const { return slices_; }
  std::span<const StepRow> rows() const { return rows_; }
  ThreadPool& pool() const { return pool_; }

  // Says that what follows belongs to this part of the step.
  void Enter(StepPart part) const { pool_.Enter(part); }

  // Calls fn(row) for every row, in parallel if there are enough of them.
  // `part` is the part of the step that this is.
  template <typename Fn>
  void ForRows(StepPart part, const Fn& fn) const {
    ForEach(part, rows_.size(), fn);
  }

  // Calls fn(i) for every i < count, in the same way. A call is as much work as
  // one on a row.
  template <typename Fn>
  void ForEach(StepPart part, size_t count, const Fn& fn) const {
    Enter(part);
    if (count <= kSerialRows) {
      for (size_t i = 0; i < count; ++i) fn(i);
      return;
    }
    const size_t rows = std::min(
        count < kManyRows ? kRowsPerTask : kManyRowsPerTask,
        CeilDiv(count, pool_.num_threads()));
    pool_.Run(CeilDiv(count, rows), [&](size_t task, size_t) {
      const size_t end = std::min(count, (task + 1) * rows);
      for (size_t i = task * rows; i < end; ++i) fn(i);
    });
  }

  // Computes several products in one parallel loop. Throws what
  // PackedMatrix::RequireSound throws.
  void MatMuls(StepPart part, std::initializer_list<MatMulJob> jobs) const;
  // Requires: RequireSound was called for the matrices.
  void MatMuls(StepPart part, std::span<const MatMulPart> parts) const;
  // Computes two products of one input, with matrices of equally many rows, in
  // stretches of columns. Calls fn(stretch) for each on the thread that has
  // computed it of both products, while it is in the thread's cache. The
  // products are stored nowhere else: `products` has room for the stretches
  // that are computed at the same time. Stretches begin at multiples of
  // kQuantBlock. Throws what PackedMatrix::RequireSound throws.
  void MatMulPair(StepPart part, const PackedMatrix& a, const PackedMatrix& b,
                  Activations& input, AlignedBuffer<float>& products,
                  const std::function<void(const PairStretch&)>& fn) const;

 private:
  // Row-wise work on this many rows costs less than waking another thread.
  static constexpr size_t kSerialRows = 3;
  // The most rows of a task. It has fewer if some threads would have no task.
  static constexpr size_t kRowsPerTask = 8;
  // From this many rows on a task has sixteen. Sixteen positions share the
  // lines in which keys are stored, so no two threads write to one line of a
  // prompt that begins at such a place.
  static constexpr size_t kManyRows = 64;
  static constexpr size_t kManyRowsPerTask = 16;

  const std::span<const SequenceSlice> slices_;
  const std::span<const StepRow> rows_;
  ThreadPool& pool_;
};

// out [input.rows, weights.rows] = the product of `input`, which this
// quantizes, with the weights. The products of several planes are added;
// `products` is room for them.
void Multiply(StepPart part, const PackedMatrix& weights, Activations& input,
              ThreadPool& pool, AlignedBuffer<float>& products, float* out);

// Adds a bias to columns [begin, end) of a row; `stretch` is column `begin`.
// Models without biases have empty ones.
inline void AddBias(const FloatVector& bias, size_t begin, size_t end,
                    float* stretch) {
  if (bias.size() != 0) Add(bias.data() + begin, end - begin, stretch);
}

// Adds a bias to a row. Models without biases have empty ones.
inline void AddBias(const FloatVector& bias, float* row) {
  if (bias.size() != 0) Add(bias.data(), bias.size(), row);
}

}  // namespace gkv

#endif  // GEMMAKV_MODEL_STEP_WORK_H_
