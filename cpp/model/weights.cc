#include "model/weights.h"

#include "model/source_reader.h"

namespace gkv {
namespace {

// Packs every matrix into memory of its own.
class MemoryLoader : public SourceReader {
 public:
  using SourceReader::SourceReader;

 protected:
  void BeginMatrix(const TensorView& view, PackedMatrix& matrix) override {
    matrix.owned = AlignedBuffer<uint8_t>(NumGroups(view.rows) *
                                          GroupBytes(view.type, view.cols));
    matrix.data = matrix.owned.data();
  }
  void TakeSlab(const TensorView& view, size_t slab, size_t,
                PackedMatrix& matrix) override {
    const size_t groups = slab * (kSlabRows / kRowGroup);
    PackSlab(view, slab,
             matrix.owned.data() + groups * GroupBytes(view.type, view.cols));
  }
};

}  // namespace

Weights LoadWeights(const ModelConfig& config, TensorSource& source,
                    ThreadPool& pool, const LoadProgress& progress) {
  config.Validate();
  const size_t total = progress ? SourceBytes(source) : 0;
  MemoryLoader loader(config, source, pool, progress, 0, total);
  Weights weights = VisitWeights(config, loader);
  weights.fingerprint = loader.fingerprint();
  return weights;
}

}  // namespace gkv
