#include "model/weights/weights.h"

#include "model/weights/quantization.h"
#include "model/weights/source_reader.h"
#include "model/weights/weight_table.h"

namespace gkv {

Weights LoadWeights(const ModelConfig& config, TensorSource& source,
                    ThreadPool& pool, const LoadProgress& progress,
                    std::optional<TensorType> quantize) {
  config.Validate();
  const std::vector<std::string> names = TensorNames(config, source);
  if (quantize) RequireFloatMatrix(config, source);
  ReadOptions options{.quantize = quantize, .progress = progress};
  if (progress) options.total = SourceBytes(source, names);
  return ReadSource(config, source, pool, options).weights;
}

}  // namespace gkv
