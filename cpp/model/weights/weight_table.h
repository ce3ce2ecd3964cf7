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

// The one table of the tensors of models (weight_table.cc). A row says what
// sources call a tensor, its role, its shape by the configuration, which models
// or layers have it, and the member of Weights where it belongs. ListWeights()
// makes an entry of each row that applies to a configuration; AltUp's products,
// one for each stream, it adds by itself. Reading a source, the names that a
// source may have, packed files, quantizing and the fingerprint all walk these
// entries, so a new tensor is a member in weights.h and a row of the table.

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

  PackedMatrix* matrix() const;  // nullptr if it is kept in another form
  RowTable* table() const;       // the same
  FloatVector& floats() const { return *std::get<FloatVector*>(to); }
};

// Returns all tensors of a model. Their order is part of the fingerprint, and
// is that of packed files. `weights` gets its layers; entries point into it.
// Requires: config.Validate() passes, `weights` is empty.
std::vector<WeightEntry> ListWeights(const ModelConfig& config,
                                     Weights& weights);

// Whether a tensor of this role cannot be quantized.
bool MustBeFloat(WeightRole role);

// Throws CorruptFile, which begins with `where`, if the entry is an ordering
// and the values are none.
void CheckOrdering(const std::string& where, const WeightEntry& entry,
                   const FloatVector& values);

// Puts a tensor that is kept as floats where it belongs, in the form that its
// role says.
void StoreFloats(const WeightEntry& entry, FloatVector values);

// Whether a tensor of this name belongs to a part that stands beside a language
// model, such as an encoder of images or sound or what projects its output.
bool IsOtherPart(std::string_view name);

// Returns the names of a source's tensors that a model of this configuration
// reads, in the source's order. Throws CorruptFile, which names a tensor that
// the model does not have: more layers than it states, norms or biases of
// another family, products after its last layer. Reading on would leave out
// what the weights were made for. Other parts may stand beside the model, and
// so may products for keys and values in layers that share those of another.
// Reads names only. Requires: config.Validate() passes.
std::vector<std::string> TensorNames(const ModelConfig& config,
                                     const TensorSource& source);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_WEIGHTS_WEIGHT_TABLE_H_
