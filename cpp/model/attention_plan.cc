#include "model/attention_plan.h"

#include <algorithm>

#include "ops/attention.h"

namespace gkv {
namespace {

// Tiles per thread from which splitting tiles into spans gains nothing.
constexpr size_t kTilesPerThread = 4;

// First position that the row at `position` sees.
size_t VisibleBegin(const KvGroup& group, size_t readable_begin,
                    size_t position) {
  if (group.window == 0 || position + 1 <= group.window) return readable_begin;
  return std::max(readable_begin, position + 1 - group.window);
}

}  // namespace

// The ops-level description of a tile in one layer.
class AttentionScratch::TileView {
 public:
  TileView(const ModelConfig& config, const SequenceSlice& slice,
           const Tile& tile, size_t layer, const float* q, float* out) {
    const KvLayout& layout = *slice.layout;
    const size_t group = layout.group_of(layer);
    const KvStepView::Group& table = slice.view->groups[group];
    kv_ = {table.blocks.data(),
           table.first_block,
           layout.block_tokens(),
           layout.key_offset(layer, tile.kv_head),
           layout.value_offset(layer, tile.kv_head),
           layout.dtype()};
    const size_t heads = config.layers[0].num_heads / config.layers[0].kv_heads;
    const size_t row_floats = config.layers[0].num_heads * config.layers[0].head_dim;
    for (size_t r = 0; r < tile.num_rows; ++r) {
      const size_t position = tile.position + r;
      const size_t begin = VisibleBegin(layout.groups()[group],
                                        table.readable_begin, position);
      for (size_t h = 0; h < heads; ++h) {
        const size_t i = r * heads + h;
        const size_t at = (tile.first_row + r) * row_floats +
                          (tile.kv_head * heads + h) * config.layers[0].head_dim;
        q_[i] = q + at;
        out_[i] = out + at;
        begin_[i] = begin;
        end_[i] = position + 1;
      }
    }
    tile_ = {q_,
             begin_,
             end_,
             tile.num_rows * heads,
             config.layers[0].head_dim,
             config.attn_soft_cap};
  }
  TileView(const TileView&) = delete;

  const KvHeadView& kv() const { return kv_; }
  const QueryTile& tile() const { return tile_; }
  float* const* out() const { return out_; }

 private:
  const float* q_[kMaxTileQueries];
  float* out_[kMaxTileQueries];
  size_t begin_[kMaxTileQueries];
  size_t end_[kMaxTileQueries];
  KvHeadView kv_;
  QueryTile tile_;
};

void AttentionScratch::Plan(const ModelConfig& config,
                            std::span<const SequenceSlice> slices,
                            size_t num_threads) {
  const size_t heads = config.layers[0].num_heads / config.layers[0].kv_heads;
  const size_t rows_per_tile = std::max<size_t>(1, kMaxTileQueries / heads);
  tiles_.clear();
  size_t first_row = 0;
  for (size_t s = 0; s < slices.size(); ++s) {
    const size_t count = slices[s].tokens.size();
    for (size_t r = 0; r < count; r += rows_per_tile) {
      for (size_t head = 0; head < config.layers[0].kv_heads; ++head) {
        tiles_.push_back({s, first_row + r, slices[s].view->begin + r,
                          std::min(rows_per_tile, count - r), head});
      }
    }
    first_row += count;
  }

  // Slices differ in dtype and block size, never in their groups.
  const std::span<const KvGroup> groups = slices[0].layout->groups();
  groups_.assign(groups.size(), {});
  const bool split =
      num_threads > 1 && tiles_.size() < kTilesPerThread * num_threads;
  if (!split) return;
  size_t max_slots = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].kind == LayerKind::kRecurrent) continue;
    groups_[g].split = true;
    size_t slot = 0;
    for (size_t t = 0; t < tiles_.size(); ++t) {
      const Tile& tile = tiles_[t];
      const size_t begin = VisibleBegin(
          groups[g], slices[tile.slice].view->groups[g].readable_begin,
          tile.position);
      const size_t last = (tile.position + tile.num_rows - 1) / kAttentionSpan;
      for (size_t span = begin / kAttentionSpan; span <= last; ++span) {
        groups_[g].spans.push_back({t, span, slot++});
      }
    }
    max_slots = std::max(max_slots, slot);
  }
  partials_.EnsureSize(max_slots * kMaxTileQueries *
                       PartialFloats(config.layers[0].head_dim));
}

void AttentionScratch::Attend(const ModelConfig& config,
                              std::span<const SequenceSlice> slices,
                              size_t layer, const float* q, float* out,
                              ThreadPool& pool) {
  const auto view = [&](const Tile& tile) {
    return TileView(config, slices[tile.slice], tile, layer, q, out);
  };
  const Group& group = groups_[slices[0].layout->group_of(layer)];
  if (!group.split) {
    pool.Run(tiles_.size(), [&](size_t task, size_t) {
      const TileView tile = view(tiles_[task]);
      AttentionTile(tile.kv(), tile.tile(), tile.out());
    });
    return;
  }
  const size_t partial_floats = PartialFloats(config.layers[0].head_dim);
  const size_t slot_floats = kMaxTileQueries * partial_floats;
  pool.Run(group.spans.size(), [&](size_t task, size_t) {
    const SpanTask& span = group.spans[task];
    const TileView tile = view(tiles_[span.tile]);
    AttentionSpanPartial(tile.kv(), tile.tile(), span.span,
                         partials_.data() + span.slot * slot_floats);
  });
  // Spans of a tile join in ascending order, into the first one's slot.
  for (size_t first = 0; first < group.spans.size();) {
    const TileView tile = view(tiles_[group.spans[first].tile]);
    float* state = partials_.data() + group.spans[first].slot * slot_floats;
    size_t next = first + 1;
    for (; next < group.spans.size() &&
           group.spans[next].tile == group.spans[first].tile;
         ++next) {
      const float* partial =
          partials_.data() + group.spans[next].slot * slot_floats;
      for (size_t i = 0; i < tile.tile().num_queries; ++i) {
        AttentionMerge(partial + i * partial_floats, config.layers[0].head_dim,
                       state + i * partial_floats);
      }
    }
    for (size_t i = 0; i < tile.tile().num_queries; ++i) {
      AttentionFinish(state + i * partial_floats, config.layers[0].head_dim,
                      tile.out()[i]);
    }
    first = next;
  }
}

}  // namespace gkv
