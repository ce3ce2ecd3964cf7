#ifndef GEMMAKV_MODEL_WEIGHTS_QUANTIZATION_H_
#define GEMMAKV_MODEL_WEIGHTS_QUANTIZATION_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gemmakv/tensor_source.h"
#include "gemmakv/tensor_type.h"
#include "model/weights/weights.h"

// Which types float matrices get that are quantized while they are loaded.

namespace gkv {

// A type that matrices can be quantized to, by its name in options.
struct QuantizeTarget {
  std::string_view name;
  TensorType type;
};

inline constexpr QuantizeTarget kQuantizeTargets[] = {
    {"q8_0", TensorType::kQ8_0},
    {"q5_0", TensorType::kQ5_0},
    {"q4_0", TensorType::kQ4_0},
    {"bf16", TensorType::kBF16},
};

// Throws InvalidArgument, which lists the names, for any other.
TensorType QuantizeTargetFromName(std::string_view name);

// Returns the type in which a matrix is kept: its own, unless that is F32, F16
// or BF16 and there is a target. Embedding and output head are kept as Q8_0
// with targets of fewer bits, and gates of recurrent layers and routers in
// their own type. Throws InvalidArgument if the target is none of
// kQuantizeTargets, or if the columns are not whole blocks of the type.
TensorType KeptType(const TensorView& matrix, WeightRole role,
                    std::optional<TensorType> target);

// Throws InvalidArgument, which lists the types found, if none of the model's
// matrices is of F32, F16 or BF16 in the source. Looks no further than the
// first one that is.
void RequireFloatMatrix(const ModelConfig& config, TensorSource& source);

// Throws an error that says why rows [begin, end) of a matrix cannot be of this
// type: CorruptFile for a NaN or infinity, else InvalidArgument for values that
// are too large for it. Requires: QuantizeWeights refuses them.
[[noreturn]] void ThrowNotRepresentable(const std::string& source,
                                        const TensorView& matrix, size_t begin,
                                        size_t end, TensorType type);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_QUANTIZATION_H_
