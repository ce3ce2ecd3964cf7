#ifndef GEMMAKV_MODEL_EMBEDDING_H_
#define GEMMAKV_MODEL_EMBEDDING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "cache/kv_layout.h"
#include "gemmakv/config.h"
#include "model/activations.h"
#include "model/forward.h"

namespace gkv {

// Returns the number of values of a whole vector: that of the model's
// projection or, without one, of its hidden states.
size_t VectorSize(const ModelConfig& config);

// Returns the lengths of the vectors that a model makes. The whole one comes
// first. The others follow for models that are trained so that the leading
// values of a vector serve as a shorter one (Matryoshka, arXiv 2205.13147).
std::vector<size_t> EmbeddingDims(const ModelConfig& config);

// sums [size] += row.
void AddToSums(const float* row, size_t size, double* sums);

// out [dim] = the leading values of `vector`, scaled to length 1. If all are
// zero, they stay so.
void UnitVector(const float* vector, size_t dim, float* out);

// Computes vectors of texts with a bidirectional model. The keys and values of
// a layer are needed only while the layer runs, so all layers of a shape store
// them in the same place, and nothing remains of them. Owns the buffers, which
// grow to what is used. Not thread-safe.
class EmbeddingPass {
 public:
  // Neither is owned; both must outlive this. Requires: a bidirectional model.
  EmbeddingPass(const Model& model, ThreadPool& pool);

  struct Text {
    std::span<const int32_t> tokens;  // at least one
    float* out;                       // [VectorSize(config)]
  };
  // Writes the mean of each text's hidden states, after the model's products
  // for it. Its length is not 1. All texts take one weight pass, and the bits
  // of one depend on no other. Throws what ForwardPass::Step throws.
  void Run(std::span<const Text> texts);

 private:
  const Model& model_;
  ThreadPool& pool_;
  const KvLayout layout_;
  ForwardPass pass_;
  AlignedBuffer<uint8_t> blocks_;  // of all texts
  AlignedBuffer<float> hidden_;    // [rows, hidden_size]
  Activations means_;              // [texts, hidden_size]
  Activations inner_;              // [texts, dense_dim]
  AlignedBuffer<float> products_;  // [planes * texts, the widest of all]
  AlignedBuffer<float> projected_;  // [texts, embedding_dim]
};

}  // namespace gkv

#endif  // GEMMAKV_MODEL_EMBEDDING_H_
