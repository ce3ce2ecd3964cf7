#include "model/weights/quantization.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "model/weights/weight_table.h"
#include "ops/quantize_weights.h"

namespace gkv {
namespace {

std::string TargetNames() {
  std::string names;
  for (const QuantizeTarget& target : kQuantizeTargets) {
    names += StrCat(names.empty() ? "" : ", ", target.name);
  }
  return names;
}

}  // namespace

TensorType QuantizeTargetFromName(std::string_view name) {
  for (const QuantizeTarget& target : kQuantizeTargets) {
    if (target.name == name) return target.type;
  }
  throw InvalidArgument(Unexpected("quantize",
                                   StrCat("one of ", TargetNames()),
                                   StrCat("\"", name, "\"")));
}

TensorType KeptType(const TensorView& matrix, WeightRole role,
                    std::optional<TensorType> target) {
  // Products of gates decide how fast a state decays, and those of routers
  // which experts a token sees. Both are a small part of a model.
  if (!target || !IsFloat(matrix.type) || role == WeightRole::kGate) {
    return matrix.type;
  }
  TensorType type = *target;
  switch (type) {
    case TensorType::kQ8_0:
    case TensorType::kBF16:
      break;
    case TensorType::kQ5_0:
    case TensorType::kQ4_0:
      // Embedding and head matter for every token, so the loss of fewer than 8
      // bits is felt most there (docs/models.md has figures).
      if (role != WeightRole::kMatrix) type = TensorType::kQ8_0;
      break;
    default:
      throw InvalidArgument(Unexpected("quantize",
                                       StrCat("one of ", TargetNames()),
                                       Info(type).name));
  }
  if (matrix.cols % Info(type).values != 0) {
    throw InvalidArgument(StrCat("quantize: tensor ", matrix.name, " has ",
                                 matrix.cols,
                                 " columns, expected a multiple of ",
                                 Info(type).values, " for ", Info(type).name));
  }
  return type;
}

void RequireFloatMatrix(const ModelConfig& config, TensorSource& source) {
  Weights weights;
  std::set<std::string_view> found;
  for (const WeightEntry& entry : ListWeights(config, weights)) {
    if (entry.matrix() == nullptr || MustBeFloat(entry.role)) continue;
    const std::optional<TensorView> view = source.Find(entry.name);
    if (!view) continue;
    if (IsFloat(view->type)) return;
    found.insert(Info(view->type).name);
  }
  std::string types;
  for (const std::string_view type : found) {
    types += StrCat(types.empty() ? "" : ", ", type);
  }
  throw InvalidArgument(StrCat("quantize: ", source.Description(),
                               ": nothing to quantize, found matrices of ",
                               types.empty() ? "no type" : types,
                               ", expected F32, F16 or BF16"));
}

void ThrowNotRepresentable(const std::string& source, const TensorView& matrix,
                           size_t begin, size_t end, TensorType type) {
  const size_t row_bytes = RowBytes(matrix.type, matrix.cols);
  std::vector<uint8_t> out(RowBytes(type, matrix.cols));
  size_t row = begin;
  while (row + 1 < end &&
         QuantizeWeights(matrix.type, matrix.data + row * row_bytes,
                         matrix.cols, type, out.data())) {
    ++row;
  }
  float largest = 0;
  for (size_t col = 0; col < matrix.cols; ++col) {
    const float value =
        FloatAt(matrix.type, matrix.data, row * matrix.cols + col);
    if (!std::isfinite(value)) {
      throw CorruptFile(StrCat(source, ": tensor ", matrix.name, " has ",
                               std::isnan(value) ? "NaN" : "infinity",
                               " in row ", row, ", column ", col,
                               ", expected finite values"));
    }
    largest = std::max(largest, std::abs(value));
  }
  throw InvalidArgument(StrCat("quantize: tensor ", matrix.name,
                               " has a magnitude of ", largest, " in row ", row,
                               ", which is too large for ", Info(type).name));
}

}  // namespace gkv
