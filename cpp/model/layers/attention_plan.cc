#include "model/layers/attention_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "ops/attention.h"

namespace gkv {
namespace {

// Tiles per thread from which splitting tiles into spans gains nothing.
constexpr size_t kTilesPerThread = 4;

// Spans whose partials one thread joins in less time than it takes to wake
// another.
constexpr size_t kSpansToJoinAlone = 32;

// What the cut of a layer's attention depends on.
auto CutKey(const LayerConfig& layer) {
  return std::tuple(layer.kind, layer.window, layer.num_heads, layer.kv_heads,
                    layer.head_dim);
}

const GroupStep& TableOf(const SequenceSlice& slice, size_t layer) {
  return slice.view->groups[slice.layout->group_of(layer)];
}

// First position that the row at `position` sees.
size_t VisibleBegin(const LayerConfig& layer, size_t readable_begin,
                    size_t position) {
  if (layer.kind != LayerKind::kSliding || position + 1 <= layer.window) {
    return readable_begin;
  }
  return std::max(readable_begin, position + 1 - layer.window);
}

// One behind the last position that the row at `position` sees, in a step that
// ends at `step_end`. A drafter's own has no keys.
size_t VisibleEnd(const ModelConfig& config, const LayerConfig& layer,
                  size_t step_end, size_t position) {
  if (config.target_hidden != 0) return position;
  if (!config.bidirectional) return position + 1;
  if (layer.kind != LayerKind::kSliding) return step_end;
  return std::min(step_end, position + layer.window);
}

}  // namespace

// The ops-level description of a tile in one layer.
class AttentionPlan::TileView {
 public:
  TileView(const ModelConfig& config, const SequenceSlice& slice,
           const Tile& tile, size_t layer, size_t read, const float* q,
           Activations& out)
      : quantized_(out) {
    const LayerConfig& shape = config.layers[layer];
    const KvLayout& layout = *slice.layout;
    const GroupStep& table = TableOf(slice, read);
    kv_ = {table.blocks.data(),
           table.first_block,
           layout.block_tokens(),
           layout.key_offset(read, tile.kv_head),
           layout.value_offset(read, tile.kv_head),
           layout.dtype()};
    const size_t heads = shape.num_heads / shape.kv_heads;
    const size_t row_floats = shape.num_heads * shape.head_dim;
    for (size_t i = 0; i < tile.num_queries; ++i) {
      const size_t row = (tile.first_query + i) / heads;
      const size_t head = (tile.first_query + i) % heads;
      const size_t position = tile.position + row;
      const size_t at = (tile.first_row + row) * row_floats +
                        (tile.kv_head * heads + head) * shape.head_dim;
      q_[i] = q + at;
      out_[i] = out.floats.data() + at;
      begin_[i] = VisibleBegin(shape, table.readable_begin, position);
      end_[i] = VisibleEnd(config, shape, slice.view->end, position);
    }
    tile_ = {q_,
             begin_,
             end_,
             tile.num_queries,
             shape.head_dim,
             config.attn_soft_cap};
  }
  TileView(const TileView&) = delete;

  const KvHeadView& kv() const { return kv_; }
  const QueryTile& tile() const { return tile_; }
  float* const* out() const { return out_; }
  // What query i's place holds is final: it becomes input of a product.
  void Finish(size_t i) const {
    const size_t at = static_cast<size_t>(out_[i] - quantized_.floats.data());
    const size_t begin = at % quantized_.cols;
    quantized_.QuantizeStretch(at / quantized_.cols, begin,
                               begin + tile_.head_dim, out_[i]);
  }

 private:
  Activations& quantized_;
  const float* q_[kMaxBlockQueries];
  float* out_[kMaxBlockQueries];
  size_t begin_[kMaxBlockQueries];
  size_t end_[kMaxBlockQueries];
  KvHeadView kv_;
  QueryTile tile_;
};

AttentionPlan::AttentionPlan(const ModelConfig& config,
                             std::vector<size_t> reads)
    : config_(config), reads_(std::move(reads)) {
  for (size_t i = 0; i < config.num_layers(); ++i) {
    const LayerConfig& layer = config.layers[i];
    const auto alike =
        std::find_if(tasks_.begin(), tasks_.end(), [&](const Tasks& tasks) {
          return CutKey(config.layers[tasks.layer]) == CutKey(layer);
        });
    tasks_of_.push_back(static_cast<size_t>(alike - tasks_.begin()));
    if (alike == tasks_.end() && layer.kind != LayerKind::kRecurrent) {
      tasks_.emplace_back().layer = i;
    }
  }
}

void AttentionPlan::Cut(std::span<const SequenceSlice> slices,
                        size_t num_threads) {
  size_t floats = 0;
  for (Tasks& tasks : tasks_) {
    const size_t head_dim = config_.layers[tasks.layer].head_dim;
    floats = std::max(
        floats, num_threads * AttentionTileFloats(kMaxBlockQueries, head_dim));
    const auto are_enough = [&] {
      return num_threads == 1 ||
             tasks.tiles.size() >= kTilesPerThread * num_threads;
    };
    tasks.spans.clear();
    CutIntoTiles(slices, kMaxBlockQueries, tasks);
    if (are_enough()) continue;
    CutIntoTiles(slices, kMaxTileQueries, tasks);
    if (are_enough()) continue;
    CutIntoSpans(slices, tasks);
    floats = std::max(
        floats,
        tasks.spans.size() * kMaxTileQueries * PartialFloats(head_dim));
  }
  partials_.EnsureSize(floats);
}

void AttentionPlan::CutIntoTiles(std::span<const SequenceSlice> slices,
                                 size_t max_queries, Tasks& tasks) const {
  const LayerConfig& layer = config_.layers[tasks.layer];
  const size_t heads = layer.num_heads / layer.kv_heads;
  tasks.tiles.clear();
  size_t first_row = 0;
  for (const SequenceSlice& slice : slices) {
    const size_t s = static_cast<size_t>(&slice - slices.data());
    const size_t count = slice.tokens.size();
    // Whole tiles also where the heads are no divisor of their size.
    for (size_t i = 0; i < count * heads; i += max_queries) {
      for (size_t head = 0; head < layer.kv_heads; ++head) {
        tasks.tiles.push_back({s, first_row, slice.begin(), i,
                               std::min(max_queries, count * heads - i),
                               head});
      }
    }
    first_row += count;
  }
}

void AttentionPlan::CutIntoSpans(std::span<const SequenceSlice> slices,
                                 Tasks& tasks) const {
  for (size_t t = 0; t < tasks.tiles.size(); ++t) {
    const Tile& tile = tasks.tiles[t];
    const LayerConfig& layer = config_.layers[tasks.layer];
    const SequenceSlice& slice = slices[tile.slice];
    const size_t heads = layer.num_heads / layer.kv_heads;
    const size_t begin =
        VisibleBegin(layer, TableOf(slice, ReadBy(tasks.layer)).readable_begin,
                     tile.position + tile.first_query / heads);
    const size_t last_query = tile.first_query + tile.num_queries - 1;
    const size_t last =
        (VisibleEnd(config_, layer, slice.view->end,
                    tile.position + last_query / heads) - 1) /
        kAttentionSpan;
    for (size_t span = begin / kAttentionSpan; span <= last; ++span) {
      tasks.spans.push_back({t, span});
    }
  }
}

void AttentionPlan::Attend(std::span<const SequenceSlice> slices, size_t layer,
                           const float* q, Activations& out,
                           ThreadPool& pool) {
  const std::vector<Tile>& tiles = tasks_[tasks_of_[layer]].tiles;
  const std::vector<Span>& spans = tasks_[tasks_of_[layer]].spans;
  const auto view = [&](const Tile& tile) {
    return TileView(config_, slices[tile.slice], tile, layer, ReadBy(layer), q,
                    out);
  };
  const size_t head_dim = config_.layers[layer].head_dim;
  if (spans.empty()) {
    const size_t floats = AttentionTileFloats(kMaxBlockQueries, head_dim);
    pool.Run(tiles.size(), [&](size_t task, size_t thread) {
      const TileView tile = view(tiles[task]);
      AttentionTile(tile.kv(), tile.tile(), partials_.data() + thread * floats,
                    tile.out());
      for (size_t i = 0; i < tile.tile().num_queries; ++i) tile.Finish(i);
    });
    return;
  }
  const size_t partial_floats = PartialFloats(head_dim);
  const auto partial = [&](size_t span) {
    return partials_.data() + span * kMaxTileQueries * partial_floats;
  };
  pool.Run(spans.size(), [&](size_t span, size_t) {
    const TileView tile = view(tiles[spans[span].tile]);
    AttentionSpanPartial(tile.kv(), tile.tile(), spans[span].index,
                         partial(span));
  });
  // Spans of a tile join in ascending order, into the first one's partial; each
  // query by itself.
  const auto join = [&](const TileView& tile, size_t first, size_t i) {
    float* const state = partial(first) + i * partial_floats;
    for (size_t next = first + 1;
         next < spans.size() && spans[next].tile == spans[first].tile; ++next) {
      AttentionMerge(partial(next) + i * partial_floats, head_dim, state);
    }
    AttentionFinish(state, head_dim, tile.out()[i]);
    tile.Finish(i);
  };
  joins_.clear();
  for (size_t first = 0; first < spans.size(); ++first) {
    const size_t t = spans[first].tile;
    if (first != 0 && t == spans[first - 1].tile) continue;
    if (spans.size() < kSpansToJoinAlone) {
      const TileView tile = view(tiles[t]);
      for (size_t i = 0; i < tiles[t].num_queries; ++i) join(tile, first, i);
      continue;
    }
    for (size_t i = 0; i < tiles[t].num_queries; ++i) {
      joins_.push_back({first, i});
    }
  }
  pool.Run(joins_.size(), [&](size_t n, size_t) {
    const auto [first, i] = joins_[n];
    join(view(tiles[spans[first].tile]), first, i);
  });
}

}  // namespace gkv
