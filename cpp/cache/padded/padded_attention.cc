// Attention over a padded cache, with the kernels of the engine. To them a row
// is a conversation of its own, whose blocks are listed in the order of their
// positions.

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "cache/padded/padded_cache.h"
#include "ops/attention.h"

namespace gkv {
namespace {

// One tile of queries on its way through the kernel.
struct Tile {
  explicit Tile(size_t stored_dim)
      : stored_dim(stored_dim),
        queries(kMaxTileQueries * stored_dim),
        results(kMaxTileQueries * stored_dim),
        scratch(AttentionTileFloats(kMaxTileQueries, stored_dim)) {
    std::fill_n(queries.data(), queries.size(), 0.0f);
  }

  size_t stored_dim;
  size_t count = 0;
  AlignedBuffer<float> queries;  // [kMaxTileQueries, stored_dim]
  AlignedBuffer<float> results;  // [kMaxTileQueries, stored_dim]
  AlignedBuffer<float> scratch;
  size_t begin[kMaxTileQueries];
  size_t end[kMaxTileQueries];
  float* out[kMaxTileQueries];  // [head_dim] of the caller
};

void RunTile(const KvHeadView& kv, size_t head_dim, float soft_cap,
             Tile& tile) {
  if (tile.count == 0) return;
  const float* q[kMaxTileQueries];
  float* results[kMaxTileQueries];
  for (size_t i = 0; i < tile.count; ++i) {
    q[i] = tile.queries.data() + i * tile.stored_dim;
    results[i] = tile.results.data() + i * tile.stored_dim;
  }
  AttentionTile(
      kv,
      {q, tile.begin, tile.end, tile.count, tile.stored_dim, soft_cap, true},
      tile.scratch.data(), results);
  for (size_t i = 0; i < tile.count; ++i) {
    std::copy_n(results[i], head_dim, tile.out[i]);
  }
  tile.count = 0;
}

}  // namespace

void PaddedCache::CheckQueries(const Query& query) const {
  CheckQueryLength(query.q_len);
  if (query.heads == 0 || query.heads % shape_.kv_heads != 0) {
    throw InvalidArgument(StrCat("q has ", query.heads,
                                 " heads, expected a multiple of the cache's ",
                                 shape_.kv_heads, " kv_heads"));
  }
  if (!std::isfinite(query.scale)) {
    throw InvalidArgument(
        StrCat("scale is ", query.scale, ", expected a finite number"));
  }
  if (!std::isfinite(query.soft_cap) || query.soft_cap < 0) {
    throw InvalidArgument(StrCat("soft_cap is ", query.soft_cap,
                                 ", expected a finite number above 0"));
  }
  for (size_t r = 0; r < shape_.batch; ++r) {
    const Range held = Held(rows_[r]);
    for (size_t i = 0; i < query.q_len; ++i) {
      const auto seen = Seen(rows_[r], query.q_len - 1 - i);
      if (!seen || seen->begin >= held.begin) continue;
      throw InvalidArgument(StrCat(
          "query ", i, " of row ", r, " sees positions from ", seen->begin,
          " on, but those before ", held.begin,
          " are not held any more: expected q_len ",
          shape_.capacity - shape_.window + 1,
          " or less (a capacity of window + q_len - 1 = ",
          shape_.window + query.q_len - 1, " allows ", query.q_len, ")"));
    }
  }
}

void PaddedCache::AttendRow(const Query& query, size_t r, float* out) const {
  const Row& row = rows_[r];
  const Range held = Held(row);
  KvHeadView kv{};
  std::vector<const uint8_t*> blocks;
  kv.first_block = held.begin / kBlockTokens;
  for (size_t b = kv.first_block; b * kBlockTokens < held.end; ++b) {
    blocks.push_back(row.blocks[b % blocks_per_row_].data());
  }
  kv.blocks = blocks.data();
  kv.block_tokens = kBlockTokens;
  kv.dtype = shape_.dtype;

  Tile tile(stored_dim_);
  const size_t group = query.heads / shape_.kv_heads;
  for (size_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
    kv.key_offset = key_offset(kv_head);
    kv.value_offset = value_offset(kv_head);
    for (size_t i = 0; i < query.q_len; ++i) {
      const auto seen = Seen(row, query.q_len - 1 - i);
      if (!seen) continue;
      for (size_t head = kv_head * group; head < (kv_head + 1) * group;
           ++head) {
        const size_t at = (i * query.heads + head) * shape_.head_dim;
        const float* q =
            query.q + r * query.q_len * query.heads * shape_.head_dim + at;
        float* scaled = tile.queries.data() + tile.count * stored_dim_;
        for (size_t d = 0; d < shape_.head_dim; ++d) {
          scaled[d] = q[d] * query.scale;
        }
        tile.begin[tile.count] = seen->begin;
        tile.end[tile.count] = seen->end;
        tile.out[tile.count] = out + at;
        if (++tile.count == kMaxTileQueries) {
          RunTile(kv, shape_.head_dim, query.soft_cap, tile);
        }
      }
    }
    RunTile(kv, shape_.head_dim, query.soft_cap, tile);
  }
}

void PaddedCache::Attend(const Query& query, float* out) const {
  const ReadLock lock(mutex_);
  CheckQueries(query);
  const ScopedFpEnvironment fp_environment;  // this thread is the caller's
  const size_t row_floats = query.q_len * query.heads * shape_.head_dim;
  std::fill_n(out, shape_.batch * row_floats, 0.0f);
  for (size_t r = 0; r < shape_.batch; ++r) {
    AttendRow(query, r, out + r * row_floats);
  }
}

}  // namespace gkv
