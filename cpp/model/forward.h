#ifndef GEMMAKV_MODEL_FORWARD_H_
#define GEMMAKV_MODEL_FORWARD_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "model/step.h"
#include "model/weights/weights.h"

namespace gkv {

class StepWork;

// What stays the same for every step of a model. Immutable, shared by threads.
struct Model {
  ModelConfig config;
  Weights weights;
};

// Runs a model.
//
// A step has slices: consecutive positions of some conversations, in any
// mixture of prefill and decoding. Each of their positions is a row. A step
// embeds the rows, takes all of them through one layer after the other, and
// computes the outputs that the slices ask for. All rows share one pass over
// the weights. After the last layer that leaves something to later steps only
// the rows that have outputs go on.
//
// Attention, recurrence, feed-forward and what some families have besides are
// parts that own their buffers (model/layers); ForwardPass composes them. All
// work is cut into independent tasks for the threads of the pool. The results
// of a slice depend neither on that cut, nor on the other slices, nor on how
// its conversation was cut into slices.
//
// Owns the activation buffers and the tables of positions, which grow to what
// is used. Not thread-safe: one step at a time.
class ForwardPass {
 public:
  // The model and the pool are not owned; both must outlive this. `reads` as in
  // Attention.
  ForwardPass(const Model& model, ThreadPool& pool,
              std::vector<size_t> reads = {});
  ~ForwardPass();

  // Computes keys, values and the outputs of the slices. Stores into the views'
  // blocks and the outputs only; the caller commits. Throws std::bad_alloc, and
  // CorruptFile for weights of a packed file that are damaged: each is checked
  // before its first use.
  // Requires: token ids in [0, vocab_size); distinct caches.
  void Step(std::span<const SequenceSlice> slices);

  // Runs all layers of a drafter, and nothing else. `enter` writes what they
  // begin with, [rows, hidden_size]; returns what the last one leaves, in the
  // same place, until the next call. Throws what Step and `enter` throw.
  const float* RunLayers(const StepWork& work,
                         const std::function<void(float* x)>& enter);

 private:
  class Parts;

  std::unique_ptr<Parts> parts_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_FORWARD_H_
