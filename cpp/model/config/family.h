#ifndef GEMMAKV_MODEL_FAMILY_H_
#define GEMMAKV_MODEL_FAMILY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gemmakv/config.h"

namespace gkv {

// The values that the sizes of one family have in common, and those that its
// files often omit.
struct Family {
  std::string_view architecture;
  // Kinds of layers, repeated until there are enough.
  std::span<const LayerKind> pattern;
  size_t vocab_size = 256000;
  size_t sliding_window = 0;  // 0: no layer slides, or sizes differ
  bool qk_norm = false;
  bool post_norms = false;
  bool biases = false;
  bool value_norm = false;
  bool keys_may_be_values = false;  // in full layers of some sizes
  bool layer_scales = false;
  bool may_have_experts = false;  // in some sizes
  // Rows of the table of per-layer embeddings; tokens beyond them have row 0.
  // 0: each token has a row.
  size_t ple_vocab = 0;
  bool ple_projected = false;  // there is no table: the embedding makes them
  size_t altup_inputs = 0;
  bool altup_correct_scale = false;
  size_t laurel_rank = 0;
  // The number of layers that have keys and values of their own, unless a file
  // says how many share; 0: all.
  size_t own_layers = 0;
  size_t ple_dim = 0;  // unless a file says otherwise; 0: sizes differ, or none
  // The head_dim of full layers and of those that slide, unless a file says
  // otherwise; 0: sizes differ.
  size_t full_head_dim = 256;
  size_t sliding_head_dim = 256;
  // Files must state which layers slide, since sizes differ in their pattern.
  bool states_pattern = false;
  // A file without a window says that no layer slides.
  bool full_without_window = false;
  // The number of first layers that are sparse, in models of more layers.
  size_t sparse_layers = 0;
  double sparsity_cutoff = 0;
  double query_scale = 0;  // 0: sizes differ
  float attn_soft_cap = 0;
  float final_soft_cap = 0;
  double rope_base_full = 0;     // 0: no layer is full
  double rope_base_sliding = 0;  // 0: no layer slides
  size_t rope_share = 1;         // head_dim / rope_dim
  size_t full_turning = 1;  // in full layers, one of this many pairs turns
  bool bf16_embedding_scale = false;
  bool bidirectional = false;
  // For published sizes: the values between two products after the mean, as a
  // multiple of hidden_size; or the size of vectors after one product.
  size_t dense_factor = 0;
  size_t embedding_dim = 0;
  bool drafts = false;  // guesses for another model, whose keys it reads
  int32_t end_of_turn = 0;  // token that ends a reply; 0: the family has none
  int32_t end_of_call = 0;  // the same after a call of a tool
};

bool HasSlidingLayers(const Family& family);
bool HasRecurrentLayers(const Family& family);

std::span<const Family> Families();
// Throws InvalidArgument, which lists the known ones.
const Family& FamilyOf(std::string_view architecture);
// nullptr if there is none.
const Family* FindFamily(std::string_view architecture);

// Sets the family's part of a configuration, also the kinds of its layers, in
// the family's pattern. Requires: hidden_size, and head_dim of the layers, are
// set.
void ApplyFamily(const Family& family, ModelConfig& config);

// Sets the part that depends on the kinds of the layers. Requires: these are
// set.
void ApplyFamilyToLayers(const Family& family, ModelConfig& config);

// Returns the named type that has as many layers, heads and hidden values;
// nullptr if there is none. Files of such a model that omit a key mean the
// value of this type.
const ModelConfig* FindNamedLike(const ModelConfig& config);

// A field that has another value than in the named type of FindNamedLike.
struct FieldDifference {
  std::string field;
  std::optional<size_t> layer;  // the first that differs, if layers do
  std::string found, expected;
};
// Compares all fields with those of the named type, but not the sizes of
// vocabularies, which files pad differently, nor dense_dim if the model has no
// such products. Without a named type nothing differs.
std::vector<FieldDifference> CompareWithNamed(const ModelConfig& config);

// Gives layers the kinds of `pattern`, repeated.
void RepeatKinds(std::span<const LayerKind> pattern, ModelConfig& config);
// Makes the last of every `period` layers full, and lets the others slide.
void RepeatKinds(size_t period, ModelConfig& config);

// Lets the last `count` layers read the keys and values of the last layer
// before them that is of their kind. Returns false if one of them has none
// before it.
bool ShareKeysValues(size_t count, ModelConfig& config);

}  // namespace gkv

#endif  // GEMMAKV_MODEL_FAMILY_H_
