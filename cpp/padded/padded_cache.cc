// Invariants, held between all public calls:
//   a row's blocks cover positions [0, total) if that is less than
//     blocks_per_row_ blocks, else there are blocks_per_row_ of them
//   the tokens of a row's runs sum up to total, pads and tokens to columns_
//   the last min(total, capacity) positions of a row are stored: they fit
//     because blocks_per_row_ * kBlockTokens >= capacity
// Only Append and Reset change a row.

#include "padded/padded_cache.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/error.h"
#include "base/fp_environment.h"
#include "base/rounding.h"
#include "ops/attention.h"
#include "ops/kv_strip.h"
#include "padded/padded_attention.h"

namespace gkv {
namespace {

constexpr size_t kMaxBatch = size_t{1} << 20;
constexpr size_t kMaxCapacity = size_t{1} << 28;
constexpr size_t kMaxKvHeads = 1024;

const PaddedShape& Checked(const PaddedShape& shape) {
  CheckRange(shape.batch, 1, kMaxBatch, "batch");
  CheckRange(shape.capacity, 1, kMaxCapacity, "capacity");
  CheckRange(shape.kv_heads, 1, kMaxKvHeads, "kv_heads");
  CheckRange(shape.head_dim, 1, kMaxHeadDim, "head_dim");
  if (shape.window > shape.capacity) {
    throw InvalidArgument(Unexpected(
        "window", StrCat("at most the capacity of ", shape.capacity),
        shape.window));
  }
  if (shape.dtype != KvDtype::kF32 && shape.dtype != KvDtype::kBF16) {
    throw InvalidArgument(Unexpected("dtype", "f32 or bf16", "int8"));
  }
  return shape;
}

}  // namespace

PaddedCache::PaddedCache(const PaddedShape& shape,
                         std::shared_ptr<BlockPool> pool)
    : shape_(Checked(shape)),
      stored_dim_(RoundUp(shape.head_dim, kKvInt8Block)),
      strip_bytes_(KvStripBytes(shape.dtype, kBlockTokens, stored_dim_)),
      block_bytes_(2 * shape.kv_heads * strip_bytes_),
      blocks_per_row_(CeilDiv(shape.capacity, kBlockTokens)),
      pool_(pool ? std::move(pool) : BlockPool::Default()),
      rows_(shape.batch) {}

PaddedCache::Range PaddedCache::Held(const Row& row) const {
  return {row.total - std::min(row.total, shape_.capacity), row.total};
}

std::vector<size_t> PaddedCache::lengths() const {
  const ReadLock lock(mutex_);
  std::vector<size_t> lengths;
  for (const Row& row : rows_) {
    lengths.push_back(std::min(row.total, shape_.capacity));
  }
  return lengths;
}

std::vector<size_t> PaddedCache::positions() const {
  const ReadLock lock(mutex_);
  std::vector<size_t> positions;
  for (const Row& row : rows_) positions.push_back(row.total);
  return positions;
}

size_t PaddedCache::nbytes() const {
  const ReadLock lock(mutex_);
  size_t blocks = 0;
  for (const Row& row : rows_) blocks += row.blocks.size();
  return blocks * block_bytes_;
}

void PaddedCache::Reset() {
  std::vector<Row> old(shape_.batch);
  const WriteLock lock(mutex_);
  std::swap(rows_, old);
  columns_ = 0;
}

void PaddedCache::CheckRoom(size_t columns,
                            std::span<const size_t> pads) const {
  if (shape_.window != 0) return;
  for (size_t r = 0; r < shape_.batch; ++r) {
    const size_t tokens = columns - (pads.empty() ? 0 : pads[r]);
    if (tokens > shape_.capacity - rows_[r].total) {
      throw CacheFull(StrCat("row ", r, " holds ", rows_[r].total,
                               " tokens and ", tokens,
                               " more are given, expected at most ",
                               shape_.capacity, " in total (its capacity)"));
    }
  }
}

void PaddedCache::Append(const float* k, const float* v, size_t columns,
                         std::span<const size_t> pads) {
  if (columns == 0) return;
  const WriteLock lock(mutex_);
  CheckRoom(columns, pads);

  // What may fail comes first, and changes nothing.
  std::vector<std::vector<BlockRef>> fresh(shape_.batch);
  for (size_t r = 0; r < shape_.batch; ++r) {
    Row& row = rows_[r];
    const size_t total = row.total + columns - (pads.empty() ? 0 : pads[r]);
    const size_t blocks =
        std::min(blocks_per_row_, CeilDiv(total, kBlockTokens));
    while (row.blocks.size() + fresh[r].size() < blocks) {
      fresh[r].push_back(pool_->Acquire(block_bytes_));
    }
    row.blocks.reserve(std::max(blocks, row.blocks.size()));
    row.runs.reserve(row.runs.size() + 1);
  }
  std::vector<float> padded(stored_dim_);

  const size_t token_floats = shape_.kv_heads * shape_.head_dim;
  for (size_t r = 0; r < shape_.batch; ++r) {
    Row& row = rows_[r];
    for (BlockRef& block : fresh[r]) row.blocks.push_back(std::move(block));
    const size_t skipped = pads.empty() ? 0 : pads[r];
    const size_t tokens = columns - skipped;
    // If a row wraps more than once, only its end is written.
    const size_t first = tokens - std::min(tokens, shape_.capacity);
    for (size_t i = first; i < tokens; ++i) {
      const size_t at = (r * columns + skipped + i) * token_floats;
      Write(row, row.total + i, k + at, v + at, padded);
    }
    row.total += tokens;
    if (skipped == 0 && !row.runs.empty()) {
      row.runs.back().tokens += tokens;
    } else {
      row.runs.push_back({skipped, tokens});
    }
  }
  columns_ += columns;
}

// `k` and `v` are [kv_heads, head_dim]. `padded` is [stored_dim_], zero from
// head_dim on.
void PaddedCache::Write(const Row& row, size_t position, const float* k,
                        const float* v, std::vector<float>& padded) const {
  uint8_t* block = row.blocks[position / kBlockTokens % blocks_per_row_].data();
  const size_t index = position % kBlockTokens;
  for (size_t head = 0; head < shape_.kv_heads; ++head) {
    const size_t at = head * shape_.head_dim;
    std::copy_n(k + at, shape_.head_dim, padded.data());
    StoreKey(shape_.dtype, padded.data(), stored_dim_, index, kBlockTokens,
             block + key_offset(head));
    std::copy_n(v + at, shape_.head_dim, padded.data());
    StoreValue(shape_.dtype, padded.data(), stored_dim_, index, kBlockTokens,
               block + value_offset(head));
  }
}

size_t PaddedCache::NumSlots() const {
  size_t longest = 0;
  for (const Row& row : rows_) longest = std::max(longest, row.total);
  return std::min(longest, shape_.capacity);
}

PaddedCache::Slots PaddedCache::Copy(bool values) const {
  const ReadLock lock(mutex_);
  Slots slots;
  slots.slots = NumSlots();
  const size_t token_floats = shape_.kv_heads * shape_.head_dim;
  slots.data.resize(shape_.batch * slots.slots * token_floats);
  std::vector<float> padded(stored_dim_);
  for (size_t r = 0; r < shape_.batch; ++r) {
    const Row& row = rows_[r];
    float* out = slots.data.data() + r * slots.slots * token_floats;
    const Range held = Held(row);
    for (size_t p = held.begin; p < held.end; ++p) {
      const uint8_t* block =
          row.blocks[p / kBlockTokens % blocks_per_row_].data();
      for (size_t head = 0; head < shape_.kv_heads; ++head) {
        if (values) {
          LoadValue(shape_.dtype, block + value_offset(head), stored_dim_,
                    p % kBlockTokens, kBlockTokens, padded.data());
        } else {
          LoadKey(shape_.dtype, block + key_offset(head), stored_dim_,
                  p % kBlockTokens, kBlockTokens, padded.data());
        }
        out = std::copy_n(padded.data(), shape_.head_dim, out);
      }
    }
  }
  return slots;
}

void PaddedCache::CheckQueryLength(size_t q_len) const {
  if (q_len < 1 || q_len > columns_) {
    const std::string expected =
        columns_ == 0 ? "columns to be given first"
                      : StrCat("1..", columns_, ", the columns given so far");
    throw InvalidArgument(Unexpected("q_len", expected, q_len));
  }
}

std::optional<PaddedCache::Range> PaddedCache::Seen(const Row& row,
                                                    size_t from_end) const {
  size_t behind = 0;  // tokens that are newer than the query
  for (auto run = row.runs.rbegin(); run != row.runs.rend(); ++run) {
    if (from_end < run->tokens) {
      const size_t end = row.total - behind - from_end;
      const bool cut = shape_.window != 0 && end > shape_.window;
      return Range{cut ? end - shape_.window : 0, end};
    }
    from_end -= run->tokens;
    if (from_end < run->pads) return std::nullopt;
    from_end -= run->pads;
    behind += run->tokens;
  }
  return std::nullopt;
}

PaddedCache::Mask PaddedCache::CausalMask(size_t q_len) const {
  const ReadLock lock(mutex_);
  CheckQueryLength(q_len);
  Mask mask;
  mask.slots = NumSlots();
  mask.data.resize(shape_.batch * q_len * mask.slots);
  for (size_t r = 0; r < shape_.batch; ++r) {
    const Range held = Held(rows_[r]);
    for (size_t i = 0; i < q_len; ++i) {
      const std::optional<Range> seen = Seen(rows_[r], q_len - 1 - i);
      if (!seen || seen->end <= held.begin) continue;
      const size_t begin = std::max(seen->begin, held.begin) - held.begin;
      const size_t end = seen->end - held.begin;
      uint8_t* row = mask.data.data() + (r * q_len + i) * mask.slots;
      std::fill(row + begin, row + end, uint8_t{1});
    }
  }
  return mask;
}

void PaddedCache::CheckQueries(const Query& query) const {
  CheckQueryLength(query.q_len);
  if (query.heads == 0 || query.heads % shape_.kv_heads != 0) {
    throw InvalidArgument(Unexpected(
        "q",
        StrCat("a multiple of the cache's ", shape_.kv_heads, " kv_heads"),
        StrCat(query.heads, " heads")));
  }
  if (!std::isfinite(query.scale)) {
    throw InvalidArgument(
        Unexpected("scale", "a finite number", query.scale));
  }
  if (!std::isfinite(query.soft_cap) || query.soft_cap < 0) {
    throw InvalidArgument(Unexpected(
        "soft_cap", "a finite number above 0", query.soft_cap));
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

// To the kernels a row is a conversation of its own, whose blocks are named in
// the order of their positions.
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

  // A tile of queries and its results, both [kMaxTileQueries, stored_dim_].
  const size_t tile_floats = kMaxTileQueries * stored_dim_;
  AlignedBuffer<float> queries(tile_floats), results(tile_floats);
  AlignedBuffer<float> scratch(
      AttentionTileFloats(kMaxTileQueries, stored_dim_));
  std::fill_n(queries.data(), tile_floats, 0.0f);
  const float* from[kMaxTileQueries];
  float* to[kMaxTileQueries];
  for (size_t i = 0; i < kMaxTileQueries; ++i) {
    from[i] = queries.data() + i * stored_dim_;
    to[i] = results.data() + i * stored_dim_;
  }
  size_t begin[kMaxTileQueries], end[kMaxTileQueries], count = 0;
  float* places[kMaxTileQueries];  // of the results in `out`
  const auto run_tile = [&] {
    if (count == 0) return;
    PaddedAttentionTile(
        kv, {from, begin, end, count, stored_dim_, query.soft_cap},
        scratch.data(), to);
    for (size_t i = 0; i < count; ++i) {
      std::copy_n(to[i], shape_.head_dim, places[i]);
    }
    count = 0;
  };

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
        float* scaled = queries.data() + count * stored_dim_;
        for (size_t d = 0; d < shape_.head_dim; ++d) {
          scaled[d] = q[d] * query.scale;
        }
        begin[count] = seen->begin;
        end[count] = seen->end;
        places[count] = out + at;
        if (++count == kMaxTileQueries) run_tile();
      }
    }
    run_tile();
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
