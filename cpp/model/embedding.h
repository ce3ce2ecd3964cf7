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

// Values of a whole vector: as a model makes it, or of its hidden states.
size_t VectorSize(const ModelConfig& config);

// Lengths of the vectors that a model makes: the whole one first, then, of
// models that are trained so that the leading values of a vector serve as a
// shorter one (Matryoshka, arXiv 2205.13147), the others.
std::vector<size_t> EmbeddingDims(const ModelConfig& config);

// sums [size] += row.
void AddToSums(const float* row, size_t size, double* sums);

// out [dim] = the leading values of `vector`, made one of length 1; all zeros
// stay what they are.
void UnitVector(const float* vector, size_t dim, float* out);

// Vectors of texts by a bidirectional model. The keys and values of a layer
// are needed while it runs, and no longer: all layers of a shape store them in
// the same place, and nothing is left behind. Owns the buffers, which grow to
// what is used. Not thread-safe.
class EmbeddingPass {
 public:
  // Neither is owned; both must outlive this. Requires: a bidirectional model.
  EmbeddingPass(const Model& model, ThreadPool& pool);

  struct Text {
    std::span<const int32_t> tokens;  // at least one
    float* out;                       // [VectorSize(config)]
  };
  // The mean of each text's hidden states, behind the model's products for it;
  // not of length 1. All texts in one weight pass; the bits of one depend on
  // no other. Throws what ForwardPass::Step throws.
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
