#ifndef GEMMAKV_MODEL_LAYERS_ATTENTION_PLAN_H_
#define GEMMAKV_MODEL_LAYERS_ATTENTION_PLAN_H_

#include <cstddef>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/step.h"

namespace gkv {

// How the attention of one step is cut into tasks: tiles of a few consecutive
// queries of one conversation (row by row, the heads of one kv head), and, where
// there are too few tiles to keep every thread busy (decoding with a long
// context), spans of positions within a tile. The cut never changes a bit of
// the result.
class AttentionPlan {
 public:
  // Not owned; must outlive this. `reads` as in Attention.
  explicit AttentionPlan(const ModelConfig& config,
                         std::vector<size_t> reads = {});

  // Before the layers of a step of these slices.
  void Cut(std::span<const SequenceSlice> slices, size_t num_threads);

  // out [rows, num_heads * head_dim], quantized, too = attention of queries q
  // (same shape, scaled and rotated) over the stored keys and values that
  // `layer` reads.
  void Attend(std::span<const SequenceSlice> slices, size_t layer,
              const float* q, Activations& out, ThreadPool& pool);

 private:
  struct Tile {
    size_t slice;
    size_t first_row;    // of the slice in the step
    size_t position;     // of that row
    size_t first_query;  // of the slice: row * heads of a kv head + head
    size_t num_queries;
    size_t kv_head;
  };
  struct Span {
    size_t tile;
    size_t index;  // of positions, see kAttentionSpan
  };
  struct Join {  // of all spans of a query
    size_t span;   // the first
    size_t query;  // of the tile
  };
  struct Tasks {  // of layers that are alike
    size_t layer;  // the first of them
    std::vector<Tile> tiles;
    std::vector<Span> spans;  // by tile, ascending; none: tiles are not split
  };
  class TileView;

  // Of up to `max_queries` queries each.
  void CutIntoTiles(std::span<const SequenceSlice> slices, size_t max_queries,
                    Tasks& tasks) const;
  void CutIntoSpans(std::span<const SequenceSlice> slices, Tasks& tasks) const;

  // The layer of the layout whose keys and values a layer reads.
  size_t ReadBy(size_t layer) const {
    return reads_.empty() ? layer : reads_[layer];
  }

  const ModelConfig& config_;
  const std::vector<size_t> reads_;
  std::vector<Tasks> tasks_;
  std::vector<size_t> tasks_of_;   // [layers]; unused in recurrent layers
  std::vector<Join> joins_;
  // Of a layer whose tiles are split [spans, kMaxTileQueries, partial floats],
  // else [threads, scratch of a whole tile].
  AlignedBuffer<float> partials_;
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_LAYERS_ATTENTION_PLAN_H_
