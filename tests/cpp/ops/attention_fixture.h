#ifndef GEMMAKV_TESTS_OPS_ATTENTION_FIXTURE_H_
#define GEMMAKV_TESTS_OPS_ATTENTION_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/float16.h"
#include "ops/attention.h"
#include "ops/kv_strip.h"

// Stored keys and values, queries and a scalar oracle for tests of attention.

namespace gkv {

struct KvShape {
  KvDtype dtype = KvDtype::kBF16;
  size_t head_dim = 64;
  size_t block_tokens = 32;
  size_t begin = 0;  // first stored position
  size_t end = 0;
};

// Positions [begin, end) of one kv head; every other byte makes a NaN. What is
// stored at a position does not depend on the block size.
class TestKv {
 public:
  explicit TestKv(const KvShape& shape)
      : shape_(shape), first_block_(shape.begin / shape.block_tokens) {
    const size_t strip =
        KvStripBytes(shape.dtype, shape.block_tokens, shape.head_dim);
    value_offset_ = kKeyOffset + strip + 128;
    const size_t last =
        (shape.end + shape.block_tokens - 1) / shape.block_tokens;
    for (size_t b = first_block_; b < last; ++b) {
      blocks_.emplace_back(value_offset_ + strip);
      std::memset(blocks_.back().data(), 0xFF, blocks_.back().size());
      addresses_.push_back(blocks_.back().data());
    }
    // A sanitizer sees who looks for a block behind the last one.
    addresses_.shrink_to_fit();
    std::vector<float> x(shape.head_dim);
    for (size_t position = shape.begin; position < shape.end; ++position) {
      std::mt19937 rng(static_cast<uint32_t>(position + 1));
      std::normal_distribution<float> normal;
      for (float& value : x) value = normal(rng);
      SetKey(position, x);
      for (float& value : x) value = normal(rng);
      SetValue(position, x);
    }
  }

  KvHeadView View() const {
    return {addresses_.data(), first_block_,  shape_.block_tokens,
            kKeyOffset,        value_offset_, shape_.dtype};
  }
  const KvShape& shape() const { return shape_; }

  void SetKey(size_t position, const std::vector<float>& x) {
    StoreKey(shape_.dtype, x.data(), shape_.head_dim, Index(position),
             shape_.block_tokens, Block(position) + kKeyOffset);
  }
  void SetValue(size_t position, const std::vector<float>& x) {
    StoreValue(shape_.dtype, x.data(), shape_.head_dim, Index(position),
               shape_.block_tokens, Block(position) + value_offset_);
  }
  // As stored.
  std::vector<float> Key(size_t position) const {
    std::vector<float> out(shape_.head_dim);
    LoadKey(shape_.dtype, Block(position) + kKeyOffset, shape_.head_dim,
            Index(position), shape_.block_tokens, out.data());
    return out;
  }
  std::vector<float> Value(size_t position) const {
    std::vector<float> out(shape_.head_dim);
    LoadValue(shape_.dtype, Block(position) + value_offset_, shape_.head_dim,
              Index(position), shape_.block_tokens, out.data());
    return out;
  }

 private:
  static constexpr size_t kKeyOffset = 64;
  size_t Index(size_t position) const { return position % shape_.block_tokens; }
  uint8_t* Block(size_t position) {
    return blocks_[position / shape_.block_tokens - first_block_].data();
  }
  const uint8_t* Block(size_t position) const {
    return blocks_[position / shape_.block_tokens - first_block_].data();
  }

  KvShape shape_;
  size_t first_block_;
  size_t value_offset_;
  std::vector<AlignedBuffer<uint8_t>> blocks_;
  std::vector<const uint8_t*> addresses_;
};

// Queries with the positions that they see.
class TestQueries {
 public:
  explicit TestQueries(size_t head_dim, float soft_cap = 0)
      : head_dim_(head_dim), soft_cap_(soft_cap) {}

  // The query's content depends on how many were added before it.
  void Add(size_t begin, size_t end) {
    std::mt19937 rng(static_cast<uint32_t>(1000 + begin_.size()));
    // Scores of deviation 2, as in models.
    std::normal_distribution<float> normal(
        0, 2 / std::sqrt(static_cast<float>(head_dim_)));
    std::vector<float> query(head_dim_);
    for (float& value : query) value = normal(rng);
    queries_.push_back(query);
    begin_.push_back(begin);
    end_.push_back(end);
  }

  size_t size() const { return queries_.size(); }
  size_t begin(size_t i) const { return begin_[i]; }
  size_t end(size_t i) const { return end_[i]; }
  std::vector<float>& query(size_t i) { return queries_[i]; }
  const std::vector<float>& query(size_t i) const { return queries_[i]; }
  float soft_cap() const { return soft_cap_; }

  // All outputs one after another, [size, head_dim], by tiles of `tile`.
  std::vector<float> Attend(const KvHeadView& kv,
                            size_t tile = kMaxBlockQueries) const {
    std::vector<float> out(size() * head_dim_, -1.0f);
    std::vector<float> scratch(AttentionTileFloats(tile, head_dim_));
    ForTiles(tile, [&](size_t first, const QueryTile& queries) {
      float* rows[kMaxBlockQueries];
      for (size_t i = 0; i < queries.num_queries; ++i) {
        rows[i] = out.data() + (first + i) * head_dim_;
      }
      AttentionTile(kv, queries, scratch.data(), rows);
    });
    return out;
  }

  // Calls fn(first query, tile).
  template <typename Fn>
  void ForTiles(size_t tile, const Fn& fn) const {
    for (size_t first = 0; first < size(); first += tile) {
      const size_t count = std::min(tile, size() - first);
      std::vector<const float*> q;
      for (size_t i = 0; i < count; ++i)
        q.push_back(queries_[first + i].data());
      fn(first, QueryTile{q.data(), &begin_[first], &end_[first], count,
                          head_dim_, soft_cap_});
    }
  }

 private:
  size_t head_dim_;
  float soft_cap_;
  std::vector<std::vector<float>> queries_;
  std::vector<size_t> begin_, end_;
};

// softmax(q K) V of query i in double. Where values are bf16, each weight is
// rounded, relative to the largest score of its span.
struct AttentionOracle {
  AttentionOracle(const TestKv& kv, const TestQueries& queries, size_t i) {
    const bool rounds = kv.shape().dtype == KvDtype::kBF16;
    const std::vector<float>& q = queries.query(i);
    const size_t begin = queries.begin(i), end = queries.end(i);
    std::vector<double> scores, span_max;
    double max = -std::numeric_limits<double>::infinity();
    for (size_t p = begin; p < end; ++p) {
      const std::vector<float> key = kv.Key(p);
      double dot = 0;
      for (size_t d = 0; d < q.size(); ++d) dot += double{q[d]} * key[d];
      const double cap = queries.soft_cap();
      scores.push_back(cap > 0 ? cap * std::tanh(dot / cap) : dot);
      max = std::max(max, scores.back());
      if (p == begin || p % kAttentionSpan == 0) {
        span_max.push_back(scores.back());
      }
      span_max.back() = std::max(span_max.back(), scores.back());
    }
    out.resize(q.size());
    std::vector<double> farthest(q.size());
    double sum = 0, largest = 0;
    for (size_t p = begin; p < end; ++p) {
      double weight = std::exp(scores[p - begin] - max);
      if (rounds) {
        const double top =
            span_max[p / kAttentionSpan - begin / kAttentionSpan];
        weight = Rounded(static_cast<float>(std::exp(scores[p - begin] - top))) *
                 std::exp(top - max);
      }
      const std::vector<float> value = kv.Value(p);
      sum += weight;
      largest = std::max(largest, weight);
      for (size_t d = 0; d < q.size(); ++d) {
        out[d] += weight * value[d];
        farthest[d] = std::max(farthest[d], std::abs(double{value[d]}));
      }
    }
    for (double& value : out) value /= sum;
    for (size_t d = 0; d < q.size(); ++d) {
      // One weight that float rounds up and double down.
      const double step = rounds ? largest / sum / 128 : 0;
      tolerance.push_back(3e-6 + step * 2 * farthest[d]);
    }
  }

  std::vector<double> out;        // [head_dim]
  std::vector<double> tolerance;  // [head_dim], measured but for that weight

 private:
  static float Rounded(float x) {
    return Float32FromBFloat16(BFloat16FromFloat32(x));
  }
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_OPS_ATTENTION_FIXTURE_H_
