#include "model/weights.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "base/error.h"
#include "base/float16.h"

namespace gkv {
namespace {

// Rows that one task packs and hashes while they are in cache. Part of the
// fingerprint's definition.
constexpr size_t kSlabRows = 256;
// Source bytes packed between two releases of source pages.
constexpr size_t kReleaseBytes = size_t{8} << 20;

class Loader {
 public:
  Loader(const ModelConfig& config, TensorSource& source, ThreadPool& pool,
         const LoadProgress& progress)
      : config_(config), source_(source), pool_(pool), progress_(progress) {}

  Weights Load() {
    if (progress_) CountBytes();
    Weights weights;
    hasher_.UpdateValue(config_.Hash().low);
    hasher_.UpdateValue(config_.Hash().high);
    const size_t hidden = config_.hidden_size;
    weights.embedding = Matrix("token_embd.weight", config_.vocab_size, hidden);
    if (source_.Find("output.weight")) {
      weights.head = Matrix("output.weight", config_.vocab_size, hidden);
    }
    weights.final_norm = Vector("output_norm.weight", hidden);
    for (size_t i = 0; i < config_.num_layers; ++i) {
      weights.layers.push_back(Layer(StrCat("blk.", i, ".")));
    }
    weights.fingerprint = hasher_.Finish();
    return weights;
  }

 private:
  void CountBytes() {
    for (const std::string& name : source_.Names()) {
      if (const auto view = source_.Find(name)) total_ += view->size_bytes();
    }
  }

  LayerWeights Layer(const std::string& prefix) {
    const size_t hidden = config_.hidden_size;
    const size_t q_dim = config_.num_heads * config_.head_dim;
    const size_t kv_dim = config_.kv_heads * config_.head_dim;
    LayerWeights layer;
    layer.attn_norm = Vector(prefix + "attn_norm.weight", hidden);
    layer.q = Matrix(prefix + "attn_q.weight", q_dim, hidden);
    layer.k = Matrix(prefix + "attn_k.weight", kv_dim, hidden);
    layer.v = Matrix(prefix + "attn_v.weight", kv_dim, hidden);
    if (config_.qk_norm) {
      layer.q_norm = Vector(prefix + "attn_q_norm.weight", config_.head_dim);
      layer.k_norm = Vector(prefix + "attn_k_norm.weight", config_.head_dim);
    }
    layer.o = Matrix(prefix + "attn_output.weight", hidden, q_dim);
    layer.ffn_norm = Vector(prefix + "ffn_norm.weight", hidden);
    layer.gate = Matrix(prefix + "ffn_gate.weight", config_.ffn_dim, hidden);
    layer.up = Matrix(prefix + "ffn_up.weight", config_.ffn_dim, hidden);
    layer.down = Matrix(prefix + "ffn_down.weight", hidden, config_.ffn_dim);
    if (config_.post_norms) {
      layer.post_attn_norm =
          Vector(prefix + "post_attention_norm.weight", hidden);
      layer.post_ffn_norm = Vector(prefix + "post_ffw_norm.weight", hidden);
    }
    return layer;
  }

  TensorView Require(const std::string& name, size_t rows, size_t cols) {
    const std::optional<TensorView> view = source_.Find(name);
    if (!view) {
      throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                               " is missing, expected shape [", rows, ", ",
                               cols, "]"));
    }
    if (view->rows != rows || view->cols != cols) {
      throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                               " has shape [", view->rows, ", ", view->cols,
                               "], expected [", rows, ", ", cols, "]"));
    }
    return *view;
  }

  PackedMatrix Matrix(const std::string& name, size_t rows, size_t cols) {
    const TensorView view = Require(name, rows, cols);
    PackedMatrix matrix;
    matrix.type = view.type;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.data =
        AlignedBuffer<uint8_t>(NumGroups(rows) * GroupBytes(view.type, cols));
    const size_t slabs = (rows + kSlabRows - 1) / kSlabRows;
    const size_t slab_bytes = kSlabRows * RowBytes(view.type, cols);
    const size_t slabs_per_batch =
        std::max<size_t>(2 * pool_.num_threads(), kReleaseBytes / slab_bytes);
    std::vector<Hash128> hashes(slabs);
    for (size_t first = 0; first < slabs; first += slabs_per_batch) {
      const size_t count = std::min(slabs_per_batch, slabs - first);
      pool_.Run(count, [&](size_t task, size_t) {
        hashes[first + task] = PackSlab(view, first + task, matrix);
      });
      const size_t begin = first * slab_bytes;
      const size_t end =
          std::min(view.size_bytes(), begin + count * slab_bytes);
      source_.Release(view, begin, end);
      Advance(end - begin);
    }
    AddToFingerprint(view, hashes);
    return matrix;
  }

  static Hash128 PackSlab(const TensorView& view, size_t slab,
                          PackedMatrix& matrix) {
    const size_t row_bytes = RowBytes(view.type, view.cols);
    const size_t group_bytes = GroupBytes(view.type, view.cols);
    const size_t begin = slab * kSlabRows;
    const size_t end = std::min(view.rows, begin + kSlabRows);
    for (size_t row = begin; row < end; row += kRowGroup) {
      PackGroup(view.type, view.data + row * row_bytes,
                std::min(kRowGroup, end - row), view.cols,
                matrix.data.data() + row / kRowGroup * group_bytes);
    }
    return HashBytes(
        {view.data + begin * row_bytes, (end - begin) * row_bytes});
  }

  // Norm weights: few values, kept as float whatever their type.
  FloatVector Vector(const std::string& name, size_t size) {
    const TensorView view = Require(name, 1, size);
    FloatVector vector(size);
    for (size_t i = 0; i < size; ++i) {
      const uint8_t* at = view.data + i * Info(view.type).bytes;
      uint16_t half = 0;
      switch (view.type) {
        case TensorType::kF32:
          std::memcpy(&vector[i], at, sizeof(float));
          break;
        case TensorType::kF16:
          std::memcpy(&half, at, sizeof(half));
          vector[i] = Float32FromFloat16(half);
          break;
        case TensorType::kBF16:
          std::memcpy(&half, at, sizeof(half));
          vector[i] = Float32FromBFloat16(half);
          break;
        default:
          throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                                   " has type ", Info(view.type).name,
                                   ", expected F32, F16 or BF16"));
      }
    }
    const Hash128 hash = HashBytes({view.data, view.size_bytes()});
    AddToFingerprint(view, {&hash, 1});
    source_.Release(view, 0, view.size_bytes());
    Advance(view.size_bytes());
    return vector;
  }

  void AddToFingerprint(const TensorView& view,
                        std::span<const Hash128> hashes) {
    hasher_.UpdateValue(static_cast<uint32_t>(view.type));
    for (const Hash128& hash : hashes) {
      hasher_.UpdateValue(hash.low);
      hasher_.UpdateValue(hash.high);
    }
  }

  void Advance(size_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  const ModelConfig& config_;
  TensorSource& source_;
  ThreadPool& pool_;
  const LoadProgress& progress_;
  Hasher hasher_;
  size_t done_ = 0;
  size_t total_ = 0;
};

}  // namespace

Weights LoadWeights(const ModelConfig& config, TensorSource& source,
                    ThreadPool& pool, const LoadProgress& progress) {
  config.Validate();
  return Loader(config, source, pool, progress).Load();
}

}  // namespace gkv
