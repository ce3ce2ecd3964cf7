#include "model/weights.h"

#include "base/error.h"
#include "model/quantization.h"
#include "model/source_reader.h"
#include "model/tensor_names.h"

namespace gkv {
namespace {

// Packs every matrix into memory of its own.
class MemoryLoader : public SourceReader {
 public:
  using SourceReader::SourceReader;

 protected:
  void BeginMatrix(const TensorView&, PackedMatrix& matrix) override {
    matrix.owned = AlignedBuffer<uint8_t>(NumGroups(matrix.rows) *
                                          GroupBytes(matrix.type, matrix.cols));
    matrix.data = matrix.owned.data();
  }
  void TakeSlab(const TensorView& view, size_t slab, size_t thread,
                PackedMatrix& matrix) override {
    PackSlab(view, slab, thread, matrix,
             matrix.owned.data() + slab * PackedSlabBytes(matrix, 0));
  }
};

}  // namespace

Weights LoadWeights(const ModelConfig& config, TensorSource& source,
                    ThreadPool& pool, const LoadProgress& progress,
                    std::optional<TensorType> quantize) {
  config.Validate();
  const std::vector<std::string> names = TensorNames(config, source);
  if (quantize) RequireFloatMatrix(source, names);
  const size_t total = progress ? SourceBytes(source, names) : 0;
  MemoryLoader loader(config, source, pool, {quantize, progress, 0, total});
  Weights weights = VisitWeights(config, loader);
  weights.fingerprint = loader.fingerprint();
  return weights;
}

}  // namespace gkv
