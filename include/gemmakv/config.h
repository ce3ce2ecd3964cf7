#ifndef GEMMAKV_CONFIG_H_
#define GEMMAKV_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gemmakv/hash.h"
#include "gemmakv/kv_dtype.h"
#include "gemmakv/layer_kind.h"

namespace gkv {

class KvLayout;

// Models whose shape is known by name, so that a cache can be made without any
// file: kGemma_2B, kGemma2_9B, kGemma3_270M, kRecurrentGemma_2B, ... (the rows
// of named_models.inc).
enum class ModelType {
#define GKV_MODEL(type, ...) type,
#include "gemmakv/named_models.inc"
#undef GKV_MODEL
};

// The fields in which layers may differ. A layer's kind decides which of them
// apply.
struct LayerConfig {
  LayerKind kind = LayerKind::kFull;
  size_t num_heads = 0;
  size_t kv_heads = 0;
  size_t head_dim = 0;
  size_t ffn_dim = 0;
  size_t window = 0;  // sliding layers: those less than so many tokens away
                      // are seen, of a bidirectional model to both sides
  // Attention layers: an earlier layer of the same kind and shape whose keys
  // and values this one reads. It has none of its own.
  std::optional<size_t> shares_kv = std::nullopt;
  size_t rope_dim = 0;     // leading values of a head that are rotated, in
                           // pairs of the first half and the second
  size_t still_pairs = 0;  // the last of the rope_dim / 2: they do not turn
  double rope_base = 0;    // rotary base
  double rope_factor = 1;  // linear position scaling
  // Activation sparsity: gates of the feed-forward count as far as they exceed
  // the mean of the layer's gates by so many of their standard deviations.
  double sparsity_cutoff = -std::numeric_limits<double>::infinity();  // all do
};

// Everything that the forward pass needs to know besides the weights. The
// differences between model families are data here, not branches elsewhere.
// fields.cc lists the fields once more and says everything else about them.
struct ModelConfig {
  std::string name;          // of the named type; empty for custom shapes
  std::string architecture;  // "gemma", "gemma2", "gemma3", "gemma3n",
                             // "gemma4", "vaultgemma", "gemma-embedding",
                             // "embeddinggemma2", "recurrentgemma",
                             // "gemma4-assistant"
  size_t hidden_size = 0;
  size_t vocab_size = 0;
  size_t context_length = 0;
  std::vector<LayerConfig> layers;
  float rms_epsilon = 1e-6f;
  float embedding_scale = 0;  // multiplies the rows of the embedding
  double query_scale = 0;     // multiplies the query before the dot product
  float attn_soft_cap = 0;    // 0: none
  float final_soft_cap = 0;   // 0: none
  bool qk_norm = false;       // RMS norm of each query and key head
  bool value_norm = false;    // RMS norm of each value head, without weights
  // Full layers have no matrix of their own for values: their values are the
  // keys as the key matrix gives them, before norm and rotation.
  bool keys_are_values = false;
  bool post_norms = false;    // RMS norm after attention and feed-forward
  bool layer_scales = false;  // a layer's output is multiplied by a weight
  // Per-layer embeddings: after its feed-forward, every layer adds a term that
  // it computes from a vector of its own, of this many values. The vectors of a
  // position come from a table of rows by token and from its embedding; in some
  // families from the embedding alone.
  size_t ple_dim = 0;    // 0: none
  size_t ple_vocab = 0;  // rows of the table: at least vocab_size, unless the
                         // family gives tokens beyond them row 0; 0: no table
  // Mixture of experts: beside its feed-forward every layer has experts, and a
  // router chooses some of them for each position.
  size_t num_experts = 0;     // 0: none
  size_t experts_used = 0;    // by a position, in each layer
  size_t expert_ffn_dim = 0;  // of each expert; a multiple of 16
  // AltUp: the number of residual streams. Layers compute one of them; the
  // others are predicted before a layer, and corrected after it.
  size_t altup_inputs = 0;   // 0: one stream
  size_t altup_active = 0;   // the one that is computed
  // Per-layer embeddings are gated by the corrected stream times a weight.
  bool altup_correct_scale = false;
  // LAuReL: beside attention, a layer's input goes through two matrices and is
  // added; this is the rank between them. 0: none.
  size_t laurel_rank = 0;
  // Models that make vectors of texts and do not generate: each position also
  // sees those after it. A text's vector is the mean of its last hidden states
  // after the final norm, and after two products if dense_dim is set (to this
  // many values and back), or after one if embedding_dim is (to the size of a
  // vector).
  bool bidirectional = false;
  size_t dense_dim = 0;      // 0: none
  size_t embedding_dim = 0;  // 0: no such product; vectors have hidden_size
  // Drafters, which have no keys and values of their own: each layer reads
  // those of another model, the target, in the target's last layer of the same
  // kind that has some. They go on from the target's hidden states, which have
  // this size.
  size_t target_hidden = 0;  // 0: no drafter
  // The number of clusters of equal size in the vocabulary. Only tokens of the
  // clusters that score highest have logits.
  size_t num_centroids = 0;   // 0: all tokens have logits
  size_t centroids_used = 0;
  // Attention outputs, the feed-forward and recurrent layers add biases.
  bool biases = false;
  // Recurrent layers; 0 without them.
  size_t lru_width = 0;
  size_t lru_blocks = 0;  // diagonal blocks of the gates' matrices
  size_t conv_width = 0;  // positions that the convolution sees
  std::vector<int32_t> eos_ids;
  int32_t bos_id = 2;

  size_t num_layers() const { return layers.size(); }
  bool HasLayers(LayerKind kind) const;

  // Throws InvalidArgument that names the first field that is out of range or
  // contradicts another.
  void Validate() const;
  // Returns the shape of this model's caches.
  std::shared_ptr<const KvLayout> MakeKvLayout(KvDtype dtype,
                                               size_t block_tokens) const;
  // Returns the identity of everything that changes a forward pass. Equal for
  // configs that differ in name, context_length and token ids only.
  Hash128 Hash() const;
  // Whether the models are of one named type: Hash() and context_length are
  // equal apart from the sizes of vocabularies, which files pad differently.
  bool SameShape(const ModelConfig& other) const;
};

// Returns the default factor of a model's embedding rows.
float DefaultEmbeddingScale(size_t hidden_size);

// Sets what all models of an architecture have in common: everything of
// `config` except the sizes, the kinds of its layers included. Requires that
// hidden_size, and head_dim of the layers, are set. Throws InvalidArgument for
// an unknown architecture.
void ApplyFamily(std::string_view architecture, ModelConfig& config);

// Returns all named types, in the order of the enumerators.
std::span<const ModelConfig> NamedConfigs();
const ModelConfig& ConfigOf(ModelType type);
// Throws InvalidArgument that lists the known names. Models that share the
// shape of another one ("codegemma-7b") are found under their own name too.
ModelType ModelTypeFromName(std::string_view name);
// Sets the name of `config` to that of the type whose shape it has, if there is
// one.
void NameByShape(ModelConfig& config);

}  // namespace gkv

#endif  // GEMMAKV_CONFIG_H_
