#include "model/weights/weight_table.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "model/config/family.h"
#include "ops/recurrent.h"

namespace gkv {
namespace {

using Config = ModelConfig;

// Sizes and conditions, as the rows of the table name them.
using Size = size_t(const Config& config, size_t layer);
size_t One(const Config&, size_t) { return 1; }
size_t Vocab(const Config& c, size_t) { return c.vocab_size; }
size_t Hidden(const Config& c, size_t) { return c.hidden_size; }
size_t Queries(const Config& c, size_t i) {
  return c.layers[i].num_heads * c.layers[i].head_dim;
}
size_t KeysValues(const Config& c, size_t i) {
  return c.layers[i].kv_heads * c.layers[i].head_dim;
}
size_t HeadDim(const Config& c, size_t i) { return c.layers[i].head_dim; }
size_t Ffn(const Config& c, size_t i) { return c.layers[i].ffn_dim; }
size_t Lru(const Config& c, size_t) { return c.lru_width; }
size_t LruBlock(const Config& c, size_t) { return c.lru_width / c.lru_blocks; }
size_t Taps(const Config& c, size_t) { return c.conv_width; }
size_t PleVocab(const Config& c, size_t) { return c.ple_vocab; }
size_t Ple(const Config& c, size_t) { return c.ple_dim; }
size_t PleOfLayers(const Config& c, size_t) {
  return c.num_layers() * c.ple_dim;
}

size_t Experts(const Config& c, size_t) { return c.num_experts; }
size_t ExpertsFfn(const Config& c, size_t) {
  return c.num_experts * c.expert_ffn_dim;
}
size_t ExpertsTwoFfn(const Config& c, size_t) {
  return c.num_experts * 2 * c.expert_ffn_dim;
}
size_t ExpertsHidden(const Config& c, size_t) {
  return c.num_experts * c.hidden_size;
}
size_t ExpertFfn(const Config& c, size_t) { return c.expert_ffn_dim; }
size_t Dense(const Config& c, size_t) { return c.dense_dim; }
size_t EmbeddingDim(const Config& c, size_t) { return c.embedding_dim; }
size_t TargetHidden(const Config& c, size_t) { return c.target_hidden; }
size_t TwoTargetHidden(const Config& c, size_t) { return 2 * c.target_hidden; }
size_t Centroids(const Config& c, size_t) { return c.num_centroids; }
size_t AltUp(const Config& c, size_t) { return c.altup_inputs; }
size_t AltUpSquare(const Config& c, size_t) {
  return c.altup_inputs * c.altup_inputs;
}
size_t Laurel(const Config& c, size_t) { return c.laurel_rank; }

using Condition = bool(const Config& config, size_t layer);
bool Always(const Config&, size_t) { return true; }
bool Recurs(const Config& c, size_t layer) {
  return c.layers[layer].kind == LayerKind::kRecurrent;
}
bool Attends(const Config& c, size_t layer) { return !Recurs(c, layer); }
bool OwnsKv(const Config& c, size_t layer) {
  return Attends(c, layer) && !c.layers[layer].shares_kv &&
         c.target_hidden == 0;
}
bool OwnsValues(const Config& c, size_t layer) {
  return OwnsKv(c, layer) &&
         !(c.keys_are_values && c.layers[layer].kind == LayerKind::kFull);
}
bool QueryNorm(const Config& c, size_t layer) {
  return c.qk_norm && Attends(c, layer);
}
bool KeyNorm(const Config& c, size_t layer) {
  return c.qk_norm && OwnsKv(c, layer);
}
bool Biases(const Config& c, size_t) { return c.biases; }
bool AttendsBiased(const Config& c, size_t layer) {
  return c.biases && Attends(c, layer);
}
bool RecursBiased(const Config& c, size_t layer) {
  return c.biases && Recurs(c, layer);
}
bool PostNorms(const Config& c, size_t) { return c.post_norms; }
bool LayerScales(const Config& c, size_t) { return c.layer_scales; }
bool HasPle(const Config& c, size_t) { return c.ple_dim != 0; }
bool HasExperts(const Config& c, size_t) { return c.num_experts != 0; }
bool HasPleTable(const Config& c, size_t) { return c.ple_vocab != 0; }
bool HasProjection(const Config& c, size_t) { return c.embedding_dim != 0; }
bool HasDense(const Config& c, size_t) { return c.dense_dim != 0; }
bool Drafts(const Config& c, size_t) { return c.target_hidden != 0; }
bool HasCentroids(const Config& c, size_t) { return c.num_centroids != 0; }
bool HasAltUp(const Config& c, size_t) { return c.altup_inputs != 0; }
bool AltUpScale(const Config& c, size_t) { return c.altup_correct_scale; }
bool HasLaurel(const Config& c, size_t) { return c.laurel_rank != 0; }

using Member =
    std::variant<PackedMatrix Weights::*, FloatVector Weights::*,
                 RowTable Weights::*, PackedMatrix LayerWeights::*,
                 FloatVector LayerWeights::*, PackedMatrix DrafterWeights::*,
                 FloatVector DrafterWeights::*,
                 PackedMatrix RecurrentWeights::*,
                 FloatVector RecurrentWeights::*, PackedMatrix ExpertWeights::*,
                 FloatVector ExpertWeights::*>;

struct Row {
  const char* name;  // after "blk.N." for tensors of a layer
  WeightRole role;
  Size* rows;
  Size* cols;
  Condition* when;
  Member member;
  Size* parts = One;
  const char* instead = nullptr;  // see WeightEntry
};

using enum WeightRole;
using L = LayerWeights;
using R = RecurrentWeights;
using E = ExpertWeights;
using D = DrafterWeights;

constexpr Row kModelRows[] = {
    // This comes before the embedding, whose rows are read in this order.
    {"masked_embd_ordering", kOrdering, One, Vocab, HasCentroids,
     &D::ordering},
    {"token_embd.weight", kEmbedding, Vocab, Hidden, Always,
     &Weights::embedding},
    {"output.weight", kHead, Vocab, Hidden, Always, &Weights::head},
    {"output_norm.weight", kVector, One, Hidden, Always, &Weights::final_norm},
    {"per_layer_token_embd.weight", kRowTable, PleVocab, PleOfLayers, HasPleTable,
     &Weights::ple_table},
    {"per_layer_model_proj.weight", kMatrix, PleOfLayers, Hidden, HasPle,
     &Weights::ple_proj},
    {"per_layer_proj_norm.weight", kVector, One, Ple, HasPle,
     &Weights::ple_norm},
    {"dense_2.weight", kMatrix, Dense, Hidden, HasDense, &Weights::dense_2},
    {"dense_3.weight", kMatrix, Hidden, Dense, HasDense, &Weights::dense_3},
    {"embedding_projection.weight", kMatrix, EmbeddingDim, Hidden,
     HasProjection, &Weights::embedding_projection},
    {"nextn.pre_projection.weight", kMatrix, Hidden, TwoTargetHidden, Drafts,
     &D::pre_projection},
    {"nextn.post_projection.weight", kMatrix, TargetHidden, Hidden, Drafts,
     &D::post_projection},
    {"masked_embd_centroids.weight", kMatrix, Centroids, Hidden, HasCentroids,
     &D::centroids},
};

constexpr Row kLayerRows[] = {
    {"attn_norm.weight", kVector, One, Hidden, Always, &L::attn_norm},
    {"rec_x.weight", kMatrix, Lru, Hidden, Recurs, &R::x},
    {"rec_y.weight", kMatrix, Lru, Hidden, Recurs, &R::y},
    {"rec_output.weight", kMatrix, Hidden, Lru, Recurs, &L::o},
    {"rec_x.bias", kVector, One, Lru, RecursBiased, &R::x_bias},
    {"rec_y.bias", kVector, One, Lru, RecursBiased, &R::y_bias},
    {"rec_output.bias", kVector, One, Hidden, RecursBiased, &L::o_bias},
    {"rec_conv.weight", kTaps, Lru, Taps, Recurs, &R::conv_taps},
    {"rec_conv.bias", kVector, One, Lru, Recurs, &R::conv_bias},
    {"rec_input_gate.weight", kGate, Lru, LruBlock, Recurs, &R::input_gate},
    {"rec_input_gate.bias", kVector, One, Lru, Recurs, &R::input_gate_bias},
    {"rec_a_gate.weight", kGate, Lru, LruBlock, Recurs, &R::a_gate},
    {"rec_a_gate.bias", kVector, One, Lru, Recurs, &R::a_gate_bias},
    {"rec_a_param", kDecay, One, Lru, Recurs, &R::decay},
    {"attn_q.weight", kMatrix, Queries, Hidden, Attends, &L::q},
    {"attn_k.weight", kMatrix, KeysValues, Hidden, OwnsKv, &L::k},
    {"attn_v.weight", kMatrix, KeysValues, Hidden, OwnsValues, &L::v},
    {"attn_q_norm.weight", kVector, One, HeadDim, QueryNorm, &L::q_norm},
    {"attn_k_norm.weight", kVector, One, HeadDim, KeyNorm, &L::k_norm},
    {"attn_output.weight", kMatrix, Hidden, Queries, Attends, &L::o},
    {"attn_output.bias", kVector, One, Hidden, AttendsBiased, &L::o_bias},
    {"ffn_norm.weight", kVector, One, Hidden, Always, &L::ffn_norm},
    {"ffn_gate.weight", kMatrix, Ffn, Hidden, Always, &L::gate},
    {"ffn_up.weight", kMatrix, Ffn, Hidden, Always, &L::up},
    {"ffn_down.weight", kMatrix, Hidden, Ffn, Always, &L::down},
    {"ffn_gate.bias", kVector, One, Ffn, Biases, &L::gate_bias},
    {"ffn_up.bias", kVector, One, Ffn, Biases, &L::up_bias},
    {"ffn_down.bias", kVector, One, Hidden, Biases, &L::down_bias},
    {"post_attention_norm.weight", kVector, One, Hidden, PostNorms,
     &L::post_attn_norm},
    {"post_ffw_norm.weight", kVector, One, Hidden, PostNorms,
     &L::post_ffn_norm},
    {"layer_output_scale.weight", kVector, One, One, LayerScales,
     &L::output_scale},
    {"inp_gate.weight", kMatrix, Ple, Hidden, HasPle, &L::ple_gate},
    {"proj.weight", kMatrix, Hidden, Ple, HasPle, &L::ple_proj},
    {"post_norm.weight", kVector, One, Hidden, HasPle, &L::post_ple_norm},
    {"ffn_gate_inp.weight", kGate, Experts, Hidden, HasExperts, &E::router},
    {"ffn_gate_inp.scale", kVector, One, Hidden, HasExperts, &E::router_scale},
    {"ffn_down_exps.scale", kVector, One, Experts, HasExperts,
     &E::expert_scale},
    {"post_ffw_norm_1.weight", kVector, One, Hidden, HasExperts,
     &E::dense_norm},
    {"pre_ffw_norm_2.weight", kVector, One, Hidden, HasExperts, &E::norm},
    {"post_ffw_norm_2.weight", kVector, One, Hidden, HasExperts,
     &E::post_norm},
    {"ffn_gate_up_exps.weight", kMatrix, ExpertsTwoFfn, Hidden, HasExperts,
     &E::gate_up, Experts, "ffn_gate_exps.weight"},
    {"ffn_gate_exps.weight", kMatrix, ExpertsFfn, Hidden, HasExperts, &E::gate,
     Experts, "ffn_gate_up_exps.weight"},
    {"ffn_up_exps.weight", kMatrix, ExpertsFfn, Hidden, HasExperts, &E::up,
     Experts, "ffn_gate_up_exps.weight"},
    {"ffn_down_exps.weight", kMatrix, ExpertsHidden, ExpertFfn, HasExperts,
     &E::down, Experts},
    {"altup_router_norm.weight", kVector, One, Hidden, HasAltUp,
     &L::altup_router_norm},
    {"altup_router.weight", kVector, AltUp, Hidden, HasAltUp,
     &L::altup_router},
    {"altup_predict_coef.weight", kVector, AltUpSquare, AltUp, HasAltUp,
     &L::altup_predict},
    {"altup_correct_coef.weight", kVector, AltUp, AltUp, HasAltUp,
     &L::altup_correct},
    {"altup_correct_scale.weight", kVector, One, Hidden, AltUpScale,
     &L::altup_scale},
    {"laurel_l.weight", kMatrix, Laurel, Hidden, HasLaurel, &L::laurel_left},
    {"laurel_r.weight", kMatrix, Hidden, Laurel, HasLaurel, &L::laurel_right},
    {"laurel_post_norm.weight", kVector, One, Hidden, HasLaurel,
     &L::laurel_post_norm},
};

// Beginnings of names in GGUF files, and in Hugging Face's, where "model." may
// stand before them.
constexpr std::string_view kOtherParts[] = {
    "v.",
    "a.",
    "mm.",
    "vision_tower.",
    "vision_model.",
    "vision_embedder.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
};

// Finds a member's address, for std::visit.
struct Place {
  using To = std::variant<PackedMatrix*, FloatVector*, RowTable*>;
  template <typename T>
  To operator()(T Weights::*member) const {
    return &(weights.*member);
  }
  template <typename T>
  To operator()(T DrafterWeights::*member) const {
    return &(weights.drafter.*member);
  }
  template <typename T>
  To operator()(T LayerWeights::*member) const {
    return &(weights.layers[layer].*member);
  }
  template <typename T>
  To operator()(T RecurrentWeights::*member) const {
    return &(weights.layers[layer].recurrent.get()->*member);
  }
  template <typename T>
  To operator()(T ExpertWeights::*member) const {
    return &(weights.layers[layer].experts.get()->*member);
  }

  Weights& weights;
  size_t layer;
};

// Returns the names of tensors that files may hold but models do not read:
// products for keys and values of layers that share those of another, scales
// that the configuration leaves out, what clusters are chosen by if a drafter
// has none, and divisors of frequencies, which are a part of the configuration.
std::unordered_set<std::string> UnreadNames(const Config& config) {
  std::unordered_set<std::string> names;
  if (FamilyOf(config.architecture).full_turning != 1) {
    names.insert("rope_freqs.weight");
  }
  if (Drafts(config, 0) && !HasCentroids(config, 0)) {
    names.insert({"masked_embd_ordering", "masked_embd_centroids.weight"});
  }
  for (size_t i = 0; i < config.num_layers(); ++i) {
    if (config.altup_inputs != 0 && !config.altup_correct_scale) {
      names.insert(StrCat("blk.", i, ".altup_correct_scale.weight"));
    }
    if (OwnsKv(config, i) || Recurs(config, i)) continue;
    for (const char* name :
         {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}) {
      names.insert(StrCat("blk.", i, ".", name));
    }
  }
  return names;
}

}  // namespace

PackedMatrix* WeightEntry::matrix() const {
  PackedMatrix* const* const matrix = std::get_if<PackedMatrix*>(&to);
  return matrix == nullptr ? nullptr : *matrix;
}

RowTable* WeightEntry::table() const {
  RowTable* const* const table = std::get_if<RowTable*>(&to);
  return table == nullptr ? nullptr : *table;
}

std::vector<WeightEntry> ListWeights(const ModelConfig& config,
                                     Weights& weights) {
  std::vector<WeightEntry> entries;
  const auto add = [&](const Row& row, const std::string& prefix, size_t i) {
    if (!row.when(config, i)) return;
    entries.push_back({prefix + row.name, row.role, row.rows(config, i),
                       row.cols(config, i),
                       std::visit(Place{weights, i}, row.member),
                       row.parts(config, i),
                       row.instead ? prefix + row.instead : std::string()});
  };
  weights.layers.resize(config.num_layers());
  for (const Row& row : kModelRows) add(row, "", 0);
  const auto add_streams = [&](const char* name,
                               std::vector<PackedMatrix>& matrices) {
    matrices.resize(config.altup_inputs - 1);
    for (size_t i = 0; i < matrices.size(); ++i) {
      entries.push_back({StrCat(name, ".", i, ".weight"), kMatrix,
                         config.hidden_size, config.hidden_size, &matrices[i],
                         1, ""});
    }
  };
  if (config.altup_inputs != 0) {
    add_streams("altup_proj", weights.altup_proj);
    add_streams("altup_unembd_proj", weights.altup_unembed);
  }
  for (size_t i = 0; i < config.num_layers(); ++i) {
    if (Recurs(config, i)) {
      weights.layers[i].recurrent = std::make_unique<RecurrentWeights>();
    }
    if (HasExperts(config, i)) {
      weights.layers[i].experts = std::make_unique<ExpertWeights>();
    }
    for (const Row& row : kLayerRows) add(row, StrCat("blk.", i, "."), i);
  }
  return entries;
}

bool MustBeFloat(WeightRole role) {
  switch (role) {
    case kMatrix:
    case kEmbedding:
    case kHead:
    case kRowTable:
      return false;
    case kGate:
    case kVector:
    case kOrdering:
    case kTaps:
    case kDecay:
      break;
  }
  return true;
}

void CheckOrdering(const std::string& where, const WeightEntry& entry,
                   const FloatVector& values) {
  if (entry.role != WeightRole::kOrdering) return;
  std::vector<bool> seen(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const bool inside =
        value >= 0 && value < static_cast<float>(values.size()) &&
        value == static_cast<float>(static_cast<size_t>(value));
    if (!inside || seen[static_cast<size_t>(value)]) {
      throw CorruptFile(StrCat(where, ": tensor ", entry.name, " has ", value,
                               inside ? " twice" : "", ", expected each of 0..",
                               values.size() - 1, " once"));
    }
    seen[static_cast<size_t>(value)] = true;
  }
}

void StoreFloats(const WeightEntry& entry, FloatVector values) {
  FloatVector& to = entry.floats();
  if (entry.role == WeightRole::kTaps) {
    to = FloatVector(values.size());
    for (size_t r = 0; r < entry.rows; ++r) {
      for (size_t c = 0; c < entry.cols; ++c) {
        to[c * entry.rows + r] = values[r * entry.cols + c];
      }
    }
    return;
  }
  to = std::move(values);
  if (entry.role == WeightRole::kDecay) {
    LruDecay(to.data(), to.size(), to.data());
  }
}

bool IsOtherPart(std::string_view name) {
  constexpr std::string_view kModel = "model.";
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  return std::any_of(
      std::begin(kOtherParts), std::end(kOtherParts),
      [&](std::string_view part) { return name.starts_with(part); });
}

std::vector<std::string> TensorNames(const ModelConfig& config,
                                     const TensorSource& source) {
  Weights weights;
  std::unordered_set<std::string_view> expected;
  const std::vector<WeightEntry> entries = ListWeights(config, weights);
  for (const WeightEntry& entry : entries) expected.insert(entry.name);
  const std::unordered_set<std::string> unread = UnreadNames(config);
  std::vector<std::string> names;
  for (std::string& name : source.Names()) {
    if (expected.contains(name)) {
      names.push_back(std::move(name));
      continue;
    }
    if (IsOtherPart(name) || unread.contains(name)) continue;
    throw CorruptFile(StrCat(source.Description(), ": found tensor ", name,
                             ", expected none of this name: the configuration "
                             "is of a ",
                             config.architecture, " model of ",
                             config.num_layers(), " layers"));
  }
  return names;
}

}  // namespace gkv
