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

std::vector<MatrixInfo> Matrices(const Weights& weights) {
  std::vector<MatrixInfo> found;
  const auto add = [&](const std::string& name, const PackedMatrix& matrix) {
    found.push_back({name + ".weight", matrix.type, matrix.rows, matrix.cols});
  };
  add("token_embd", weights.embedding);
  if (weights.head) add("output", *weights.head);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    const std::string prefix = StrCat("blk.", i, ".");
    if (layer.recurrent) {
      const RecurrentWeights& recurrent = *layer.recurrent;
      add(prefix + "rec_x", recurrent.x);
      add(prefix + "rec_y", recurrent.y);
      add(prefix + "rec_input_gate", recurrent.input_gate);
      add(prefix + "rec_a_gate", recurrent.a_gate);
      add(prefix + "rec_output", layer.o);
    } else {
      add(prefix + "attn_q", layer.q);
      add(prefix + "attn_k", layer.k);
      add(prefix + "attn_v", layer.v);
      add(prefix + "attn_output", layer.o);
    }
    add(prefix + "ffn_gate", layer.gate);
    add(prefix + "ffn_up", layer.up);
    add(prefix + "ffn_down", layer.down);
  }
  return found;
}

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
