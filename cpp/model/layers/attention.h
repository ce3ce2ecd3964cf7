#ifndef GEMMAKV_MODEL_LAYERS_ATTENTION_H_
#define GEMMAKV_MODEL_LAYERS_ATTENTION_H_

#include <cstddef>
#include <vector>

#include "base/aligned_buffer.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/layers/attention_plan.h"
#include "model/step_work.h"
#include "model/weights/weights.h"
#include "ops/rope.h"

namespace gkv {

// The temporal mixing of attention layers, full and sliding: queries, keys and
// values, their norms and rotations, storing, and attention over what is
// stored. A layer that shares the keys and values of another stores nothing.
// Owns the activations, and the tables of rotations, which grow to the
// positions that are used.
class Attention {
 public:
  // Not owned; must outlive this. `reads`: of each layer of a drafter, the
  // layer of its target; the slices' views and layouts are the target's.
  explicit Attention(const ModelConfig& config,
                     std::vector<size_t> reads = {});

  // Before the layers of a step: Begin, then Rotations for each of its rows,
  // which may run beside one another.
  void Begin(const StepWork& work);
  void Rotations(const StepWork& work, size_t row);

  // Computes attention of the step's rows in `input`. Returns [rows, num_heads
  // * head_dim], which are quantized, too. Keys and values go into the blocks
  // of the slices' views, unless they are `kept` there already.
  Activations& Mix(const LayerWeights& weights, size_t layer,
                   Activations& input, const StepWork& work, bool kept = false);
  // Stores keys and values and does nothing else.
  void KeepKeys(const LayerWeights& weights, size_t layer, Activations& input,
                const StepWork& work);

 private:
  // Rotations of the step's positions, for layers that rotate alike.
  struct Rope {
    double base, factor;
    size_t dim, still_pairs;
    RopeTable table;
    AlignedBuffer<float> cos, sin;  // [rows, dim / 2]
  };

  size_t RopeOf(const LayerConfig& layer);
  void FinishHeads(size_t layer, const FloatVector& norm, size_t row,
                   size_t heads, float* x) const;
  void FinishValues(const LayerConfig& shape, float* v) const;
  void Keep(const LayerWeights& weights, size_t layer, size_t row,
            const StepWork& work);
  void Store(size_t layer, const StepRow& row, const SequenceSlice& slice,
             const float* k, const float* v) const;

  const ModelConfig& config_;
  AttentionPlan plan_;
  std::vector<Rope> ropes_;
  std::vector<size_t> rope_of_;     // [layers]; unused in recurrent layers
  FloatVector ones_;  // [largest head_dim], of norms without weight
  AlignedBuffer<float> q_, k_, v_;  // [rows, heads * head_dim]
  Activations attended_;            // [rows, num_heads * head_dim]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_ATTENTION_H_
