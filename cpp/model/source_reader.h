#ifndef GEMMAKV_MODEL_SOURCE_READER_H_
#define GEMMAKV_MODEL_SOURCE_READER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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
// they belong. The fingerprint stays empty. Requires: config.Validate() passes.
Weights VisitWeights(const ModelConfig& config, WeightVisitor& visitor);

// Rows that one task reads while they are in cache. Part of the definition of
// the fingerprint. A whole number of groups.
inline constexpr size_t kSlabRows = 256;

constexpr size_t NumSlabs(size_t rows) {
  return (rows + kSlabRows - 1) / kSlabRows;
}

// Packed form of slab `slab` of a matrix: whole groups, back to back.
size_t PackedSlabBytes(const TensorView& view, size_t slab);
void PackSlab(const TensorView& view, size_t slab, uint8_t* out);

// Reads tensors from a source once, in parallel, gives its bytes back behind
// itself, and takes the fingerprint of what it read. What becomes of a matrix
// is up to a derived class: here nothing, PackedMatrix has no data.
class SourceReader : public WeightVisitor {
 public:
  // Source and pool are not owned. `progress` counts bytes of the source, from
  // `done` on up to `total`.
  SourceReader(const ModelConfig& config, TensorSource& source,
               ThreadPool& pool, const LoadProgress& progress, size_t done,
               size_t total);

  bool Has(const std::string& name) override;
  // Throw CorruptFile for a tensor that is missing, or of the wrong shape or
  // type.
  PackedMatrix Matrix(const std::string& name, size_t rows,
                      size_t cols) override;
  FloatVector Floats(const std::string& name, size_t rows,
                     size_t cols) override;

  // Of the configuration and of all that was read.
  Hash128 fingerprint() const { return hasher_.Finish(); }
  size_t done() const { return done_; }

 protected:
  // Before the first slab of a matrix.
  virtual void BeginMatrix(const TensorView& view, PackedMatrix& matrix);
  // Runs on any thread; must not throw.
  virtual void TakeSlab(const TensorView& view, size_t slab, size_t thread,
                        PackedMatrix& matrix);
  virtual void TakeFloats(const TensorView& view, const FloatVector& vector);

  ThreadPool& pool_;

 private:
  TensorView Require(const std::string& name, size_t rows, size_t cols);
  void AddToFingerprint(const TensorView& view,
                        const std::vector<Hash128>& hashes);
  void Advance(size_t bytes);

  TensorSource& source_;
  const LoadProgress progress_;
  Hasher hasher_;
  size_t done_;
  const size_t total_;
};

// Bytes of all tensors of a source.
size_t SourceBytes(TensorSource& source);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_SOURCE_READER_H_
