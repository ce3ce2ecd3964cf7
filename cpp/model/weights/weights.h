#ifndef GEMMAKV_MODEL_WEIGHTS_WEIGHTS_H_
#define GEMMAKV_MODEL_WEIGHTS_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "gemmakv/config.h"
#include "gemmakv/options.h"
#include "gemmakv/tensor_source.h"
#include "io/mapped_file.h"
#include "model/weights/packed_file.h"
#include "ops/matmul.h"

namespace gkv {

// A weight matrix in the row-interleaved layout of ops/matmul.h.
struct PackedMatrix {
  TensorType type = TensorType::kF32;
  size_t rows = 0;
  size_t cols = 0;
  const uint8_t* data = nullptr;  // in `owned`, or in `file`
  AlignedBuffer<uint8_t> owned;
  // Its place in the packed file of Weights, or null.
  const PackedFile* file = nullptr;
  const PackedFile::Tensor* tensor = nullptr;

  PackedView view() const { return {type, rows, cols, data}; }

  // Called before the bytes are used. Compares those of a packed file with
  // their sum, the first time. Throws CorruptFile if they are damaged.
  void RequireSound(ThreadPool& pool) const {
    if (tensor == nullptr ||
        tensor->is_sound.load(std::memory_order_acquire)) {
      return;
    }
    pool.Enter(StepPart::kChecks);
    if (!file->Check(*tensor, pool)) file->DeleteDamaged(*tensor);
  }
};

// A matrix whose rows are read one by one, in the form and at the place that
// its source has it: in a file that stays mapped, else in a copy.
struct RowTable {
  TensorType type = TensorType::kF32;
  size_t rows = 0;
  size_t cols = 0;
  const uint8_t* data = nullptr;
  std::shared_ptr<const void> held;  // what `data` points into

  const uint8_t* row(size_t r) const { return data + r * RowBytes(type, cols); }
  // Says that only rows are read from now on.
  void ExpectRows() const {
    ExpectScatteredReads(data, rows * RowBytes(type, cols));
  }
  // Begins to read a row, without waiting for it.
  void Prefetch(size_t r) const { PrefetchPages(row(r), RowBytes(type, cols)); }
};

// The use of a tensor, which says how it is kept.
enum class WeightRole {
  kMatrix,     // for products: packed, quantized on request
  kEmbedding,  // the same, but rows are read too
  kHead,       // the same; files may lack it, and the embedding serves
  kRowTable,   // see RowTable: neither packed nor quantized
  kGate,       // for block-diagonal products and routers: packed in its own
               // float type
  kVector,     // floats
  kOrdering,   // the same: each of the numbers below its length, once
  kTaps,       // floats, transposed
  kDecay,      // floats, as LruDecay changes them
};

using FloatVector = AlignedBuffer<float>;

// The temporal mixing of a recurrent layer (ops/recurrent.h).
struct RecurrentWeights {
  PackedMatrix x, y;           // [lru_width, hidden_size]
  FloatVector x_bias, y_bias;  // [lru_width]
  FloatVector conv_taps;       // [conv_width, lru_width], oldest first
  FloatVector conv_bias;       // [lru_width]
  // Block-diagonal: row r reads the inputs of its own block. Always float.
  PackedMatrix input_gate, a_gate;  // [lru_width, lru_width / lru_blocks]
  FloatVector input_gate_bias, a_gate_bias;  // [lru_width]
  FloatVector decay;                         // [lru_width], see LruDecay
};

// The experts of a layer, which it has beside its feed-forward. The matrices of
// all experts are one below the other, each of whole groups of rows.
struct ExpertWeights {
  PackedMatrix router;       // [num_experts, hidden_size], always float
  FloatVector router_scale;  // [hidden_size]
  FloatVector expert_scale;  // [num_experts]
  FloatVector dense_norm;    // [hidden_size], after the feed-forward
  FloatVector norm;          // [hidden_size], before the experts
  FloatVector post_norm;     // [hidden_size], after their sum
  // For each expert the gate's rows, then those of `up`; or the two apart, as
  // the source has them.
  PackedMatrix gate_up;   // [num_experts * 2 * expert_ffn_dim, hidden_size]
  PackedMatrix gate, up;  // [num_experts * expert_ffn_dim, hidden_size]
  PackedMatrix down;      // [num_experts * hidden_size, expert_ffn_dim]
};

// Vectors that a model or a layer does not have are empty.
struct LayerWeights {
  FloatVector attn_norm;  // [hidden_size], before the temporal mixing
  std::unique_ptr<RecurrentWeights> recurrent;  // of recurrent layers
  PackedMatrix q, k, v;        // [heads * head_dim, hidden_size]; values that
                               // are keys have none of their own
  FloatVector q_norm, k_norm;  // [head_dim], with qk_norm
  // Output of attention, [hidden_size, num_heads * head_dim], or of the
  // recurrence, [hidden_size, lru_width].
  PackedMatrix o;
  FloatVector o_bias;              // [hidden_size], with biases
  FloatVector post_attn_norm;      // [hidden_size], with post_norms
  FloatVector ffn_norm;            // [hidden_size]
  PackedMatrix gate, up;           // [ffn_dim, hidden_size]
  FloatVector gate_bias, up_bias;  // [ffn_dim], with biases
  PackedMatrix down;               // [hidden_size, ffn_dim]
  FloatVector down_bias;           // [hidden_size], with biases
  FloatVector post_ffn_norm;       // [hidden_size], with post_norms
  std::unique_ptr<ExpertWeights> experts;  // of models with experts
  FloatVector output_scale;        // [1], with layer_scales
  // With per-layer embeddings: from the output to ple_dim, and back.
  PackedMatrix ple_gate;      // [ple_dim, hidden_size]
  PackedMatrix ple_proj;      // [hidden_size, ple_dim]
  FloatVector post_ple_norm;  // [hidden_size]
  // AltUp, with altup_inputs.
  FloatVector altup_router_norm;  // [hidden_size]
  FloatVector altup_router;       // [altup_inputs, hidden_size]
  FloatVector altup_predict;      // [altup_inputs^2, altup_inputs]
  FloatVector altup_correct;      // [altup_inputs, altup_inputs]
  FloatVector altup_scale;        // [hidden_size], with altup_correct_scale
  // LAuReL, with laurel_rank.
  PackedMatrix laurel_left;      // [laurel_rank, hidden_size]
  PackedMatrix laurel_right;     // [hidden_size, laurel_rank]
  FloatVector laurel_post_norm;  // [hidden_size]
};

// The name of a matrix of loaded weights, and how it is kept.
struct MatrixInfo {
  std::string name;  // as in the source
  TensorType type;
  size_t rows;
  size_t cols;
};

// The weights that a drafter has besides its layers. A matrix that it lacks has
// no rows.
struct DrafterWeights {
  // pre_projection [hidden_size, 2 * target_hidden] reads the target's
  // embedding of a token and its hidden state before that, side by side.
  // post_projection [target_hidden, hidden_size] makes the hidden state of the
  // next step of what the head reads.
  PackedMatrix pre_projection, post_projection;
  PackedMatrix centroids;  // [num_centroids, hidden_size]
  // With centroids: the tokens of the first cluster, then of the second one,
  // and so on. Rows of the embedding are in this order.
  FloatVector ordering;    // [vocab_size]
};

// A model's weights. Immutable after loading; shared by every conversation
// and thread.
struct Weights {
  PackedMatrix embedding;  // [vocab_size, hidden_size]
  PackedMatrix head;       // the same; without rows, the embedding serves
  FloatVector final_norm;  // [hidden_size]
  // Per-layer embeddings: the table with a row for each token, the projection
  // of the token's embedding, and its norm, the same for all layers.
  RowTable ple_table;     // [ple_vocab, num_layers * ple_dim]
  PackedMatrix ple_proj;  // [num_layers * ple_dim, hidden_size]
  FloatVector ple_norm;   // [ple_dim]
  // Models of embeddings: the products after the mean.
  PackedMatrix dense_2;  // [dense_dim, hidden_size]
  PackedMatrix dense_3;  // [hidden_size, dense_dim]
  PackedMatrix embedding_projection;  // [embedding_dim, hidden_size]
  // AltUp: for each stream but the first, [hidden_size, hidden_size], from the
  // embedding to the stream, and from the stream to the output.
  std::vector<PackedMatrix> altup_proj, altup_unembed;
  DrafterWeights drafter;
  std::vector<LayerWeights> layers;
  std::vector<MatrixInfo> matrices;  // all of the above, as they were read, but
                                     // for tables of rows
  // The hash of the configuration, of every tensor's logical bytes, in a fixed
  // order, and of the types that matrices were quantized to.
  Hash128 fingerprint;
  // The file that matrices without memory of their own point into, or null.
  std::shared_ptr<const PackedFile> file;

  const PackedMatrix& output_head() const {
    return head.rows != 0 ? head : embedding;
  }
};

// Reads and packs all weights. It takes several slabs of rows at a time and
// then releases their source bytes, so the peak is the packed size and a few
// slabs. With `quantize`, float matrices are kept in that type
// (quantization.h). Throws CorruptFile for a tensor that is missing or has the
// wrong shape, InvalidArgument for a source that `quantize` does not suit, and
// whatever `source` throws.
Weights LoadWeights(const ModelConfig& config, TensorSource& source,
                    ThreadPool& pool, const LoadProgress& progress,
                    std::optional<TensorType> quantize = std::nullopt);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_WEIGHTS_H_
