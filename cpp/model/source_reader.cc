#include "model/source_reader.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/float16.h"
#include "base/fp_environment.h"
#include "model/quantization.h"
#include "ops/quantize_weights.h"
#include "ops/recurrent.h"

namespace gkv {
namespace {

static_assert(kSlabRows % kRowGroup == 0);

// Source bytes read between two releases of source pages.
constexpr size_t kReleaseBytes = size_t{8} << 20;

// The tensors of one layer, by the ends of their names.
class LayerVisit {
 public:
  LayerVisit(const ModelConfig& config, size_t layer, WeightVisitor& visitor)
      : config_(config),
        layer_(layer),
        prefix_(StrCat("blk.", layer, ".")),
        visitor_(visitor) {}

  LayerWeights Run() {
    LayerWeights layer;
    const size_t hidden = config_.hidden_size;
    layer.attn_norm = Vector("attn_norm.weight", hidden);
    if (config_.layer_kinds[layer_] == LayerKind::kRecurrent) {
      Recurrent(layer);
    } else {
      Attention(layer);
    }
    layer.ffn_norm = Vector("ffn_norm.weight", hidden);
    layer.gate = Matrix("ffn_gate.weight", config_.ffn_dim, hidden);
    layer.up = Matrix("ffn_up.weight", config_.ffn_dim, hidden);
    layer.down = Matrix("ffn_down.weight", hidden, config_.ffn_dim);
    if (config_.biases) {
      layer.gate_bias = Vector("ffn_gate.bias", config_.ffn_dim);
      layer.up_bias = Vector("ffn_up.bias", config_.ffn_dim);
      layer.down_bias = Vector("ffn_down.bias", hidden);
    }
    if (config_.post_norms) {
      layer.post_attn_norm = Vector("post_attention_norm.weight", hidden);
      layer.post_ffn_norm = Vector("post_ffw_norm.weight", hidden);
    }
    return layer;
  }

 private:
  PackedMatrix Matrix(const char* name, size_t rows, size_t cols) {
    return visitor_.Matrix(prefix_ + name, rows, cols);
  }
  FloatVector Vector(const char* name, size_t size) {
    return visitor_.Vector(prefix_ + name, size);
  }

  void Attention(LayerWeights& layer) {
    const size_t hidden = config_.hidden_size;
    const size_t q_dim = config_.num_heads * config_.head_dim;
    const size_t kv_dim = config_.kv_heads * config_.head_dim;
    layer.q = Matrix("attn_q.weight", q_dim, hidden);
    layer.k = Matrix("attn_k.weight", kv_dim, hidden);
    layer.v = Matrix("attn_v.weight", kv_dim, hidden);
    if (config_.qk_norm) {
      layer.q_norm = Vector("attn_q_norm.weight", config_.head_dim);
      layer.k_norm = Vector("attn_k_norm.weight", config_.head_dim);
    }
    layer.o = Matrix("attn_output.weight", hidden, q_dim);
    if (config_.biases) layer.o_bias = Vector("attn_output.bias", hidden);
  }

  void Recurrent(LayerWeights& layer) {
    const size_t hidden = config_.hidden_size;
    const size_t width = config_.lru_width;
    layer.recurrent = std::make_unique<RecurrentWeights>();
    RecurrentWeights& weights = *layer.recurrent;
    weights.x = Matrix("rec_x.weight", width, hidden);
    weights.y = Matrix("rec_y.weight", width, hidden);
    layer.o = Matrix("rec_output.weight", hidden, width);
    if (config_.biases) {
      weights.x_bias = Vector("rec_x.bias", width);
      weights.y_bias = Vector("rec_y.bias", width);
      layer.o_bias = Vector("rec_output.bias", hidden);
    }
    const FloatVector taps =
        visitor_.Floats(prefix_ + "rec_conv.weight", width, config_.conv_width);
    weights.conv_taps = Transposed(taps, width, config_.conv_width);
    weights.conv_bias = Vector("rec_conv.bias", width);
    weights.input_gate = Gate("rec_input_gate.weight");
    weights.input_gate_bias = Vector("rec_input_gate.bias", width);
    weights.a_gate = Gate("rec_a_gate.weight");
    weights.a_gate_bias = Vector("rec_a_gate.bias", width);
    weights.decay = Vector("rec_a_param", width);
    LruDecay(weights.decay.data(), width, weights.decay.data());
  }

  PackedMatrix Gate(const char* name) {
    const size_t width = config_.lru_width;
    PackedMatrix gate = Matrix(name, width, width / config_.lru_blocks);
    if (UsesQuantizedActivations(gate.type)) {
      throw CorruptFile(StrCat("tensor ", prefix_, name, " has type ",
                               Info(gate.type).name,
                               ", expected F32, F16 or BF16"));
    }
    return gate;
  }

  static FloatVector Transposed(const FloatVector& in, size_t rows,
                                size_t cols) {
    FloatVector out(rows * cols);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
    }
    return out;
  }

  const ModelConfig& config_;
  const size_t layer_;
  const std::string prefix_;
  WeightVisitor& visitor_;
};

// Hands requests on and notes the matrices.
class MatrixList : public WeightVisitor {
 public:
  MatrixList(WeightVisitor& visitor, std::vector<MatrixInfo>& matrices)
      : visitor_(visitor), matrices_(matrices) {}

  bool Has(const std::string& name) override { return visitor_.Has(name); }
  PackedMatrix Matrix(const std::string& name, size_t rows,
                      size_t cols) override {
    PackedMatrix matrix = visitor_.Matrix(name, rows, cols);
    matrices_.push_back({name, matrix.type, rows, cols});
    return matrix;
  }
  FloatVector Floats(const std::string& name, size_t rows,
                     size_t cols) override {
    return visitor_.Floats(name, rows, cols);
  }

 private:
  WeightVisitor& visitor_;
  std::vector<MatrixInfo>& matrices_;
};

}  // namespace

Weights VisitWeights(const ModelConfig& config, WeightVisitor& source) {
  const ScopedFpEnvironment fp_environment;
  Weights weights;
  MatrixList visitor(source, weights.matrices);
  const size_t hidden = config.hidden_size;
  weights.embedding =
      visitor.Matrix("token_embd.weight", config.vocab_size, hidden);
  if (visitor.Has("output.weight")) {
    weights.head = visitor.Matrix("output.weight", config.vocab_size, hidden);
  }
  weights.final_norm = visitor.Vector("output_norm.weight", hidden);
  for (size_t i = 0; i < config.num_layers; ++i) {
    weights.layers.push_back(LayerVisit(config, i, visitor).Run());
  }
  return weights;
}

size_t PackedSlabBytes(const PackedMatrix& matrix, size_t slab) {
  const size_t begin = slab * kSlabRows;
  const size_t rows = std::min(kSlabRows, matrix.rows - begin);
  return NumGroups(rows) * GroupBytes(matrix.type, matrix.cols);
}

SourceReader::SourceReader(const ModelConfig& config, TensorSource& source,
                           ThreadPool& pool, const ReadOptions& options)
    : pool_(pool),
      source_(source),
      options_(options),
      done_(options.done),
      quantized_(pool.num_threads()) {
  hasher_.UpdateValue(config.Hash().low);
  hasher_.UpdateValue(config.Hash().high);
}

bool SourceReader::Has(const std::string& name) {
  return source_.Find(name).has_value();
}

void SourceReader::BeginMatrix(const TensorView&, PackedMatrix&) {}
void SourceReader::TakeSlab(const TensorView&, size_t, size_t, PackedMatrix&) {}
void SourceReader::TakeFloats(const TensorView&, const FloatVector&) {}

void SourceReader::PackSlab(const TensorView& view, size_t slab, size_t thread,
                            const PackedMatrix& matrix, uint8_t* out) {
  const size_t row_bytes = RowBytes(view.type, view.cols);
  const size_t group_bytes = GroupBytes(matrix.type, matrix.cols);
  uint8_t* const quantized = quantized_[thread].data();
  const size_t begin = slab * kSlabRows;
  const size_t end = std::min(view.rows, begin + kSlabRows);
  for (size_t row = begin; row < end; row += kRowGroup, out += group_bytes) {
    const size_t rows = std::min(kRowGroup, end - row);
    const uint8_t* source = view.data + row * row_bytes;
    if (matrix.type != view.type) {
      if (!QuantizeWeights(view.type, source, rows * view.cols, matrix.type,
                           quantized)) {
        representable_ = false;
        return;
      }
      source = quantized;
    }
    PackGroup(matrix.type, source, rows, matrix.cols, out);
  }
}

TensorView SourceReader::Require(const std::string& name, size_t rows,
                                 size_t cols) {
  const std::optional<TensorView> view = source_.Find(name);
  if (!view) {
    throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                             " is missing, expected shape [", rows, ", ", cols,
                             "]"));
  }
  if (view->rows != rows || view->cols != cols) {
    throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                             " has shape [", view->rows, ", ", view->cols,
                             "], expected [", rows, ", ", cols, "]"));
  }
  return *view;
}

PackedMatrix SourceReader::Matrix(const std::string& name, size_t rows,
                                  size_t cols) {
  const TensorView view = Require(name, rows, cols);
  PackedMatrix matrix;
  matrix.type = KeptType(view, options_.quantize);
  matrix.rows = rows;
  matrix.cols = cols;
  if (matrix.type != view.type) {
    for (auto& rows_of_group : quantized_) {
      rows_of_group.EnsureSize(GroupBytes(matrix.type, cols));
    }
  }
  BeginMatrix(view, matrix);
  const size_t row_bytes = RowBytes(view.type, cols);
  const size_t slab_bytes = kSlabRows * row_bytes;
  const size_t slabs_per_batch =
      std::max<size_t>(2 * pool_.num_threads(), kReleaseBytes / slab_bytes);
  std::vector<Hash128> hashes(NumSlabs(rows));
  for (size_t first = 0; first < hashes.size(); first += slabs_per_batch) {
    const size_t count = std::min(slabs_per_batch, hashes.size() - first);
    pool_.Run(count, [&](size_t task, size_t thread) {
      const size_t slab = first + task;
      TakeSlab(view, slab, thread, matrix);
      const size_t begin = slab * slab_bytes;
      hashes[slab] = HashBytes(
          {view.data + begin, std::min(slab_bytes, view.size_bytes() - begin)});
    });
    if (!representable_) {
      ThrowNotRepresentable(source_.Description(), view, first * kSlabRows,
                            std::min(rows, (first + count) * kSlabRows),
                            matrix.type);
    }
    const size_t begin = first * slab_bytes;
    const size_t end = std::min(view.size_bytes(), begin + count * slab_bytes);
    source_.Release(view, begin, end);
    Advance(end - begin);
  }
  AddToFingerprint(view, matrix.type, hashes);
  return matrix;
}

// Few values, whatever their type.
FloatVector SourceReader::Floats(const std::string& name, size_t rows,
                                 size_t cols) {
  const TensorView view = Require(name, rows, cols);
  if (!IsFloat(view.type)) {
    throw CorruptFile(StrCat(source_.Description(), ": tensor ", name,
                             " has type ", Info(view.type).name,
                             ", expected F32, F16 or BF16"));
  }
  FloatVector vector(rows * cols);
  for (size_t i = 0; i < vector.size(); ++i)
    vector[i] = FloatAt(view.type, view.data, i);
  TakeFloats(view, vector);
  AddToFingerprint(view, view.type,
                   {HashBytes({view.data, view.size_bytes()})});
  source_.Release(view, 0, view.size_bytes());
  Advance(view.size_bytes());
  return vector;
}

// What a matrix is quantized to follows from its bytes and the type alone.
void SourceReader::AddToFingerprint(const TensorView& view, TensorType kept,
                                    const std::vector<Hash128>& hashes) {
  hasher_.UpdateValue(static_cast<uint32_t>(view.type));
  if (kept != view.type) hasher_.UpdateValue(static_cast<uint32_t>(kept));
  for (const Hash128& hash : hashes) {
    hasher_.UpdateValue(hash.low);
    hasher_.UpdateValue(hash.high);
  }
}

void SourceReader::Advance(size_t bytes) {
  done_ += bytes;
  if (options_.progress) options_.progress(done_, options_.total);
}

size_t SourceBytes(TensorSource& source,
                   const std::vector<std::string>& names) {
  size_t total = 0;
  for (const std::string& name : names) {
    const std::optional<TensorView> view = source.Find(name);
    if (!view) continue;
    total += view->size_bytes();
    // Sources that make a tensor when asked for it need not keep all of them.
    source.Release(*view, 0, view->size_bytes());
  }
  return total;
}

}  // namespace gkv
