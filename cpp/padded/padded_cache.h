#ifndef GEMMAKV_PADDED_PADDED_CACHE_H_
#define GEMMAKV_PADDED_PADDED_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "cache/block_pool.h"
#include "gemmakv/kv_dtype.h"

namespace gkv {

struct PaddedShape {
  size_t batch;
  size_t capacity;  // tokens held per row
  // 0: linear, no row ever holds more than `capacity` tokens. Else cyclic: a
  // row keeps its last `capacity` tokens, and a token at position p sees
  // positions p - window + 1 to p. Requires: window <= capacity.
  size_t window;
  size_t kv_heads;
  size_t head_dim;
  KvDtype dtype;  // kF32 or kBF16
};

// The keys and values of one layer for a batch of rows: for models that are
// built elsewhere and feed their own tensors. Tensors are [batch, columns,
// kv_heads, head_dim]. A call gives every row the same number of columns, of
// which the leftmost may be pads. Pads are never stored, so rows have lengths
// of their own; the logical position of a token is the number of tokens of its
// row before it.
//
// Results list the held tokens of a row in slots 0, 1, ... from the oldest to
// the newest. The number of slots is that of the longest row; slots that a
// shorter row does not fill are zeros.
//
// Memory grows in blocks of kBlockTokens tokens per row up to the capacity.
// Thread-safe; readers run at the same time.
class PaddedCache {
 public:
  static constexpr size_t kBlockTokens = 16;

  // Throws InvalidArgument for a size that is zero or out of range.
  explicit PaddedCache(const PaddedShape& shape,
                       std::shared_ptr<BlockPool> pool = nullptr);

  const PaddedShape& shape() const { return shape_; }
  // The number of tokens held, [batch].
  std::vector<size_t> lengths() const;
  // The number of tokens given so far: the logical position of each row's next
  // token.
  std::vector<size_t> positions() const;
  size_t nbytes() const;

  // Appends `columns` columns of keys and values; row r skips the first
  // pads[r]. Empty `pads`: none. Throws CacheFull, changing nothing, if a
  // linear row would exceed the capacity or the pool has no memory. Requires:
  // pads[r] <= columns.
  void Append(const float* k, const float* v, size_t columns,
              std::span<const size_t> pads = {});
  // Makes the cache empty; blocks go back to the pool.
  void Reset();

  struct Slots {
    std::vector<float> data;  // [batch, slots, kv_heads, head_dim]
    size_t slots;
  };
  Slots Keys() const { return Copy(false); }
  Slots Values() const { return Copy(true); }

  struct Mask {
    std::vector<uint8_t> data;  // [batch, q_len, slots], 1: attends
    size_t slots;
  };
  // Returns which slots the newest `q_len` columns see: themselves and the
  // columns before them (of the window, if cyclic), as far as they are held. A
  // pad sees nothing. Throws InvalidArgument unless 1 <= q_len <= the columns
  // given.
  Mask CausalMask(size_t q_len) const;

  struct Query {
    const float* q;  // [batch, q_len, heads, head_dim]
    size_t q_len;
    size_t heads;    // multiple of kv_heads: head h reads kv head
                     // h / (heads / kv_heads)
    float scale;     // scores are scale * dot(q, key)
    float soft_cap;  // 0: none; else scores become cap * tanh(score / cap)
  };
  // Computes attention of the newest q_len columns: out [batch, q_len, heads,
  // head_dim], zeros for pads. Throws InvalidArgument if the sizes do not fit,
  // or if a query's window reaches back to tokens that are not held any more.
  void Attend(const Query& query, float* out) const;

 private:
  struct Run {  // columns of one call or several: pads, then tokens
    size_t pads;
    size_t tokens;
  };
  struct Row {
    size_t total = 0;  // tokens given so far
    // Position p lies in blocks[p / kBlockTokens % blocks_per_row_].
    std::vector<BlockRef> blocks;
    std::vector<Run> runs;
  };
  struct Range {  // positions [begin, end)
    size_t begin;
    size_t end;
  };

  Slots Copy(bool values) const;
  void CheckRoom(size_t columns, std::span<const size_t> pads) const
      REQUIRES(mutex_);
  void Write(const Row& row, size_t position, const float* k, const float* v,
             std::vector<float>& padded) const;
  void CheckQueries(const Query& query) const REQUIRES_SHARED(mutex_);
  void AttendRow(const Query& query, size_t row, float* out) const
      REQUIRES_SHARED(mutex_);
  Range Held(const Row& row) const;
  // Returns what the query `from_end` columns before the newest one sees, held
  // or not; nothing for a pad.
  std::optional<Range> Seen(const Row& row, size_t from_end) const;
  void CheckQueryLength(size_t q_len) const REQUIRES_SHARED(mutex_);
  size_t NumSlots() const REQUIRES_SHARED(mutex_);
  size_t key_offset(size_t kv_head) const { return 2 * kv_head * strip_bytes_; }
  size_t value_offset(size_t kv_head) const {
    return key_offset(kv_head) + strip_bytes_;
  }

  const PaddedShape shape_;
  const size_t stored_dim_;  // head_dim rounded up to what kernels take
  const size_t strip_bytes_;
  const size_t block_bytes_;
  const size_t blocks_per_row_;
  const std::shared_ptr<BlockPool> pool_;
  mutable SharedMutex mutex_{AtFork::kWaits};
  size_t columns_ GUARDED_BY(mutex_) = 0;     // given so far
  std::vector<Row> rows_ GUARDED_BY(mutex_);  // [batch]
};

}  // namespace gkv

#endif  // GEMMAKV_PADDED_PADDED_CACHE_H_
