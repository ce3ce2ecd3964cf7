#ifndef GEMMAKV_MODEL_SOURCE_READER_H_
#define GEMMAKV_MODEL_SOURCE_READER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/hash.h"
#include "base/thread_pool.h"
#include "io/tensor_source.h"
#include "model/config.h"
#include "model/weights.h"

// How weights come into being: VisitWeights knows which tensors a model has,
// a visitor where they come from. Internal to model.

namespace gkv {

class WeightVisitor {
 public:
  virtual ~WeightVisitor() = default;
  virtual bool Has(const std::string& name) = 0;
  virtual PackedMatrix Matrix(const std::string& name, size_t rows,
                              size_t cols) = 0;
  // Kept as floats, [rows, cols]: biases, norms, small matrices that no product
  // is made with.
  virtual FloatVector Floats(const std::string& name, size_t rows,
                             size_t cols) = 0;
  FloatVector Vector(const std::string& name, size_t size) {
    return Floats(name, 1, size);
  }
};

// Asks for every tensor of the model, in a fixed order, and puts them where
// they belong. The fingerprint stays empty. Whatever the floating-point state
// of the calling thread, the weights are the same. Requires: config.Validate()
// passes.
Weights VisitWeights(const ModelConfig& config, WeightVisitor& visitor);

// Rows that one task reads while they are in cache. Part of the definition of
// the fingerprint. A whole number of groups.
inline constexpr size_t kSlabRows = 256;

constexpr size_t NumSlabs(size_t rows) {
  return (rows + kSlabRows - 1) / kSlabRows;
}

// Bytes of slab `slab` of a matrix in packed form: whole groups, back to back.
size_t PackedSlabBytes(const PackedMatrix& matrix, size_t slab);

// How a source is read.
struct ReadOptions {
  std::optional<TensorType> quantize;  // see KeptType
  // Counts bytes of the source, from `done` on up to `total`.
  LoadProgress progress;
  size_t done = 0;
  size_t total = 0;
};

// Reads tensors from a source once, in parallel, gives its bytes back behind
// itself, and takes the fingerprint of what it read. What becomes of a matrix
// is up to a derived class: here nothing, PackedMatrix has no data.
class SourceReader : public WeightVisitor {
 public:
  // Source and pool are not owned.
  SourceReader(const ModelConfig& config, TensorSource& source,
               ThreadPool& pool, const ReadOptions& options);

  bool Has(const std::string& name) override;
  // Throw CorruptFile for a tensor that is missing, or of the wrong shape or
  // type; Matrix also what KeptType throws, and what ThrowNotRepresentable does
  // for a matrix that cannot be quantized.
  PackedMatrix Matrix(const std::string& name, size_t rows,
                      size_t cols) override;
  FloatVector Floats(const std::string& name, size_t rows,
                     size_t cols) override;

  // Of the configuration, of all that was read, and of the types that matrices
  // were quantized to.
  Hash128 fingerprint() const { return hasher_.Finish(); }
  size_t done() const { return done_; }

 protected:
  // Before the first slab of a matrix, which has its type and shape.
  virtual void BeginMatrix(const TensorView& view, PackedMatrix& matrix);
  // Runs on any thread; must not throw.
  virtual void TakeSlab(const TensorView& view, size_t slab, size_t thread,
                        PackedMatrix& matrix);
  // For TakeSlab: packs a slab, quantized if `matrix` is of another type than
  // the source. `out` is undefined for a slab that cannot be: the load fails
  // then.
  void PackSlab(const TensorView& view, size_t slab, size_t thread,
                const PackedMatrix& matrix, uint8_t* out);
  virtual void TakeFloats(const TensorView& view, const FloatVector& vector);

  ThreadPool& pool_;

 private:
  TensorView Require(const std::string& name, size_t rows, size_t cols);
  void AddToFingerprint(const TensorView& view, TensorType kept,
                        const std::vector<Hash128>& hashes);
  void Advance(size_t bytes);

  TensorSource& source_;
  const ReadOptions options_;
  Hasher hasher_;
  size_t done_;
  std::vector<AlignedBuffer<uint8_t>> quantized_;  // [thread], one group's rows
  std::atomic<bool> representable_{true};
};

// Bytes of these tensors of a source.
size_t SourceBytes(TensorSource& source, const std::vector<std::string>& names);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_SOURCE_READER_H_
