#ifndef GEMMAKV_MODEL_WEIGHTS_WEIGHT_TABLE_H_
#define GEMMAKV_MODEL_WEIGHTS_WEIGHT_TABLE_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gemmakv/config.h"
#include "gemmakv/tensor_source.h"
#include "model/weights/weights.h"

namespace gkv {

// A tensor of one model.
struct WeightEntry {
  std::string name;  // as sources call it
  WeightRole role;
  size_t rows;
  size_t cols;
  std::variant<PackedMatrix*, FloatVector*, RowTable*> to;  // where it belongs
  size_t parts = 1;     // see TensorView
  std::string instead;  // a tensor that sources may have in place of this one;
                        // empty: none

  PackedMatrix* matrix() const;  // nullptr: kept otherwise
  RowTable* table() const;       // the same
  FloatVector& floats() const { return *std::get<FloatVector*>(to); }
};

// All tensors of a model, from one table. Their order is part of the
// fingerprint, and is that of packed files. `weights` gets its layers; entries
// point into it. Requires: config.Validate() passes, `weights` is empty.
std::vector<WeightEntry> ListWeights(const ModelConfig& config,
                                     Weights& weights);

// Whether quantized values cannot serve.
bool MustBeFloat(WeightRole role);

// Throws CorruptFile, beginning with `where`, for values that are no ordering
// where the entry is one.
void CheckOrdering(const std::string& where, const WeightEntry& entry,
                   const FloatVector& values);

// Puts a tensor that is kept as floats where it belongs, in the form that its
// role says.
void StoreFloats(const WeightEntry& entry, FloatVector values);

// Whether a tensor of this name belongs to a part that stands beside a language
// model, such as an encoder of images or sound or what projects its output.
bool IsOtherPart(std::string_view name);

// The tensors of a source that a model of this configuration reads, in the
// source's order. Throws CorruptFile naming a tensor that the model does not
// have: more layers than it states, norms or biases of another family, products
// behind its last layer. Reading on would leave out what the weights were made
// for. Other parts may stand beside the model, and so may products for keys and
// values in layers that share those of another. Reads names only. Requires:
// config.Validate() passes.
std::vector<std::string> TensorNames(const ModelConfig& config,
                                     const TensorSource& source);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_WEIGHT_TABLE_H_
