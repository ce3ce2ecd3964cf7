#ifndef GEMMAKV_MODEL_ATTENTION_PLAN_H_
#define GEMMAKV_MODEL_ATTENTION_PLAN_H_

#include <cstddef>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "model/config/config.h"
#include "model/step.h"

namespace gkv {

// How the attention of one step is cut into tasks: tiles of a few consecutive
// rows of one conversation with the query heads of one kv head, and, where
// there are too few tiles to keep every thread busy (decoding with a long
// context), spans of positions within a tile. The cut never changes a bit of
// the result.
class AttentionScratch {
 public:
  // Requires: slices of one step, of a model of this shape.
  void Plan(const ModelConfig& config, std::span<const SequenceSlice> slices,
            size_t num_threads);

  // out [rows, num_heads * head_dim] = attention of queries q (same shape,
  // scaled and rotated) over the stored keys and values of `layer`.
  void Attend(const ModelConfig& config, std::span<const SequenceSlice> slices,
              size_t layer, const float* q, float* out, ThreadPool& pool);

 private:
  struct Tile {
    size_t slice;
    size_t first_row;  // of the step
    size_t position;   // of that row
    size_t num_rows;
    size_t kv_head;
  };
  // Part of a tile: one span, its partial result in slot `slot`.
  struct SpanTask {
    size_t tile;
    size_t span;
    size_t slot;
  };
  struct Group {  // tasks for layers of one KvGroup
    bool split = false;
    std::vector<SpanTask> spans;  // if split: grouped by tile, ascending
  };
  class TileView;

  std::vector<Tile> tiles_;
  std::vector<Group> groups_;
  AlignedBuffer<float> partials_;  // [slots, kMaxTileQueries, partial floats]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_ATTENTION_PLAN_H_
