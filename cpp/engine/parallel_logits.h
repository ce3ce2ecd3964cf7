#ifndef GEMMAKV_ENGINE_PARALLEL_LOGITS_H_
#define GEMMAKV_ENGINE_PARALLEL_LOGITS_H_

#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "ops/logits.h"

// Reductions of ops/logits.h over one row, computed in stretches on several
// threads: a pass over a vocabulary takes as long as a small matrix product.
// The bits do not depend on the number of threads. `pool` is null if the caller
// has no pool to itself; requires that no loop runs on it.

namespace gkv {

ScoredToken ArgMax(std::span<const float> logits, ThreadPool* pool);

// Returns the sums of ExpShifted over each kExpSumPartition tokens. Throws
// std::bad_alloc.
std::vector<double> ExpSums(std::span<const float> logits, float max,
                            float inverse_temperature, ThreadPool* pool);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_PARALLEL_LOGITS_H_
