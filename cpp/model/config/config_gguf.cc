// Configurations of GGUF files: what the metadata state, and for what they
// omit, what files of that family mean by it.

#include "model/config/config_gguf.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "base/fp_environment.h"
#include "model/config/family.h"
#include "model/config/fields.h"
#include "model/config/gguf_keys.h"

namespace gkv {
namespace {

// Reads a family's metadata keys, which all start with the architecture.
class MetadataReader {
 public:
  MetadataReader(GgufFile& file, const Family& family)
      : file_(file),
        family_(family),
        prefix_(StrCat(*file.GetString("general.architecture"), ".")) {}

  GgufFile& file() const { return file_; }
  const Family& family() const { return family_; }

  // Says that from here on what a file omits is as in this type; null: as the
  // family says.
  void SetNamed(const ModelConfig* named) { named_ = named; }
  const ModelConfig* named() const { return named_; }

  // Reads a field by its own key: a number, or an array with one for each
  // layer. A key that is missing leaves what the type or the family says.
  void Read(const Field& field, ModelConfig& config) const {
    const std::string key = KeyOf(field);
    const std::string sliding = StrCat(prefix_, field.gguf, "_swa");
    const bool by_kind = field.layers == kAllLayers && file_.Has(sliding);
    const bool stated = file_.Has(key);
    std::vector<double> values = FindOmitted(field, config);
    const std::vector<double> omitted = values;
    if (stated) values = ReadNumbers(key, field);
    if (by_kind && (values.size() == 1 || !stated)) {
      values = JoinKinds(values, ReadNumbers(sliding, field), config);
    } else if (stated && values.size() == 1 && field.gguf_swa &&
               omitted.size() != 1 &&
               omitted == JoinKinds(values, omitted, config)) {
      // The number is that of full layers; those that slide have their own.
      values = omitted;
    }
    if (values.empty()) throw MissingKey(key);
    try {
      field.Check(config, values, StrCat(file_.path(), ": metadata ", key));
    } catch (const InvalidArgument& error) {
      if (!stated && !by_kind) throw MissingKey(key);
      throw CorruptFile(error.what());
    }
    field.Set(config, values);
  }
  bool Has(const char* key) const { return file_.Has(prefix_ + key); }
  size_t Size(const char* key, size_t fallback) const {
    return static_cast<size_t>(file_.GetUint(prefix_ + key).value_or(fallback));
  }
  double Float(const char* key, double fallback) const {
    return file_.GetFloat(prefix_ + key).value_or(fallback);
  }
  // Returns the values of an array; nullopt for a single value or none.
  std::optional<std::vector<int64_t>> Flags(const char* key) const {
    if (!IsArray(prefix_ + key)) return std::nullopt;
    return file_.GetInts(prefix_ + key);
  }
  std::string_view Text(const char* key, std::string_view fallback) const {
    return file_.GetString(prefix_ + key).value_or(fallback);
  }
  // Returns the error of a key, from the printed forms of `what`.
  template <class E>
  E Refusal(const char* key, const auto&... what) const {
    return E(StrCat(file_.path(), ": metadata ", prefix_, key, what...));
  }

 private:
  bool IsArray(const std::string& key) const {
    const std::optional<GgufValue> value = file_.Get(key);
    return value && std::holds_alternative<GgufArray>(*value);
  }
  std::vector<double> ReadNumbers(const std::string& key,
                                  const Field& field) const {
    const bool whole = field.at.type == Field::Type::kSize;
    if (!IsArray(key)) {
      return {whole ? static_cast<double>(*file_.GetUint(key))
                    : *file_.GetFloat(key)};
    }
    if (!whole) return *file_.GetFloats(key);
    const std::vector<int64_t> sizes = *file_.GetInts(key);
    return {sizes.begin(), sizes.end()};
  }

  CorruptFile MissingKey(const std::string& key) const {
    return CorruptFile(StrCat(file_.path(), ": metadata ", key, " is missing"));
  }

  // Returns the first of the field's keys that the file has, or its own key if
  // the file has none.
  std::string KeyOf(const Field& field) const {
    const std::string key = prefix_ + field.gguf;
    if (file_.Has(key)) return key;
    for (const char* const other : field.gguf_also) {
      if (other != nullptr && Has(other)) return prefix_ + other;
    }
    return key;
  }

  // Returns the values that a file means by leaving out the key; none if it
  // must state them.
  std::vector<double> FindOmitted(const Field& field,
                                  const ModelConfig& config) const {
    if (named_ != nullptr) return field.Get(*named_);
    std::vector<double> values = field.Get(config);
    if (*std::min_element(values.begin(), values.end()) < field.low) {
      values = field.Default(config);
    }
    return values;
  }

  // Returns a number for each layer, from those for full layers and those for
  // layers that slide, of which there is one or one for each layer. Any other
  // count is returned as it is, for the check of the field to refuse it.
  static std::vector<double> JoinKinds(const std::vector<double>& full,
                                       const std::vector<double>& sliding,
                                       const ModelConfig& config) {
    const size_t layers = config.num_layers();
    const auto fits = [&](const std::vector<double>& values) {
      return values.size() == 1 || values.size() == layers;
    };
    if (!fits(full)) return full;
    if (!fits(sliding)) return sliding;
    std::vector<double> values;
    for (size_t i = 0; i < layers; ++i) {
      const bool slides = config.layers[i].kind == LayerKind::kSliding;
      values.push_back(NumberAt(slides ? sliding : full, i));
    }
    return values;
  }

  GgufFile& file_;
  const Family& family_;
  std::string prefix_;
  const ModelConfig* named_ = nullptr;
};

// Returns the number of rows of a matrix, which no key states.
size_t RowsOf(const GgufFile& file, std::string_view name) {
  for (const GgufFile::TensorInfo& tensor : file.tensors()) {
    if (tensor.name == name && tensor.shape.size() == 2) {
      return static_cast<size_t>(tensor.shape[1]);
    }
  }
  throw CorruptFile(
      StrCat(file.path(), ": tensor ", name, " is missing or not a matrix"));
}

// Whether the type's layers are of the same kinds, and whether its heads have
// the same sizes. Then the rest of what it says holds for these layers, too.
bool SameKinds(const ModelConfig* named, const ModelConfig& config) {
  return named != nullptr &&
         std::equal(named->layers.begin(), named->layers.end(),
                    config.layers.begin(),
                    [](const LayerConfig& a, const LayerConfig& b) {
                      return a.kind == b.kind;
                    });
}
bool SameHeads(const ModelConfig* named, const ModelConfig& config) {
  const Field& field = FieldNamed("head_dim");
  return named != nullptr && field.Get(*named) == field.Get(config);
}

// Returns how queries are scaled, which files do not state. Named types of the
// same size say it; all others divide by the square root of head_dim.
double QueryScale(const Family& family, const ModelConfig& config) {
  if (family.query_scale != 0) return family.query_scale;
  for (const ModelConfig& named : NamedConfigs()) {
    if (named.architecture == config.architecture &&
        named.hidden_size == config.hidden_size &&
        named.num_layers() == config.num_layers() &&
        named.layers[0].num_heads == config.layers[0].num_heads &&
        named.layers[0].head_dim == config.layers[0].head_dim) {
      return named.query_scale;
    }
  }
  return 1.0 / std::sqrt(static_cast<double>(config.layers[0].head_dim));
}

// Reads which layers slide: those of the named type, or of the family's
// pattern, unless the file says otherwise by a flag for each layer or by the
// length of a period.
void ReadKinds(const MetadataReader& read, ModelConfig& config) {
  const Family& family = read.family();
  if (!HasSlidingLayers(family)) return;
  constexpr const char* kPattern = "attention.sliding_window_pattern";
  if (const auto slides = read.Flags(kPattern)) {
    if (slides->size() != config.num_layers()) {
      throw CorruptFile(StrCat(read.file().path(),
                               ": sliding_window_pattern has ", slides->size(),
                               " entries, expected one for each of ",
                               config.num_layers(), " layers"));
    }
    for (size_t i = 0; i < slides->size(); ++i) {
      config.layers[i].kind =
          (*slides)[i] != 0 ? LayerKind::kSliding : LayerKind::kFull;
    }
    return;
  }
  if (family.full_without_window &&
      read.Size("attention.sliding_window", 0) == 0) {
    RepeatKinds(std::array{LayerKind::kFull}, config);
    return;
  }
  if (!read.Has(kPattern) && read.named() != nullptr) {
    for (size_t i = 0; i < config.num_layers(); ++i) {
      config.layers[i].kind = read.named()->layers[i].kind;
    }
    return;
  }
  if (!read.Has(kPattern) && family.states_pattern) {
    throw read.Refusal<CorruptFile>(kPattern, " is missing");
  }
  const size_t period = read.Size(kPattern, family.pattern.size());
  if (period == 0) {
    throw CorruptFile(StrCat(read.file().path(),
                             ": sliding_window_pattern is 0, expected >= 1"));
  }
  RepeatKinds(period, config);
}

// Reads what of rotations is more than a plain number of a key.
void ReadRope(const MetadataReader& read, ModelConfig& config) {
  const std::string_view type = read.Text("rope.scaling.type", "linear");
  if (type != "linear" && type != "none") {
    throw read.Refusal<Mismatch>("rope.scaling.type", " is '", type,
                                 "', expected 'linear' or 'none'");
  }
  double omitted = 1;
  if (read.named() != nullptr) {
    omitted = FieldNamed("rope_factor_full").Get(*read.named())[0];
  }
  // rope.scale_linear is the older name of the key.
  const char* const key =
      read.Has("rope.scaling.factor") || !read.Has("rope.scale_linear")
          ? "rope.scaling.factor"
          : "rope.scale_linear";
  const double stated = type == "none" ? 1 : read.Float(key, omitted);
  // 0 is how llama.cpp writes that nothing is scaled.
  const double factor = stated == 0 ? 1 : stated;
  // If both kinds of layers rotate alike, files state one base for both.
  const bool alike =
      read.family().rope_base_full == read.family().rope_base_sliding;
  const bool slides = config.HasLayers(LayerKind::kSliding);
  if (alike && slides && factor != 1) {
    throw read.Refusal<Mismatch>("rope.scaling.factor", " is ", factor,
                                 ", expected 1 for this architecture");
  }
  const bool one_base = alike && !read.Has("rope.freq_base_swa");
  for (LayerConfig& layer : config.layers) {
    if (layer.kind == LayerKind::kFull) {
      layer.rope_factor = factor;
    } else if (one_base) {
      layer.rope_base = read.Float("rope.freq_base", layer.rope_base);
    }
  }
}

// Reads which pairs of full layers do not turn. Files state what each pair's
// frequency is divided by: 1, or more than any position.
void ReadStillPairs(GgufFile& file, const Family& family, ModelConfig& config) {
  if (family.full_turning == 1 || !config.HasLayers(LayerKind::kFull)) return;
  constexpr const char* kName = "rope_freqs.weight";
  const auto refuse = [&](const auto&... what) {
    throw CorruptFile(StrCat(file.path(), ": tensor ", kName, what...));
  };
  const std::optional<TensorView> divisors = file.Find(kName);
  if (!divisors) {
    refuse(
        " is missing, expected what frequencies of full layers are "
        "divided by");
  }
  if (divisors->type != TensorType::kF32) {
    refuse(" has type ", Info(divisors->type).name, ", expected F32");
  }
  size_t turning = 0;
  const size_t pairs = divisors->rows * divisors->cols;
  for (size_t i = 0; i < pairs; ++i) {
    const float divisor = FloatAt(divisors->type, divisors->data, i);
    if (divisor == 1 && turning == i) {
      ++turning;
    } else if (!(divisor >= 1e20f)) {
      refuse(" divides by ", divisor, " at ", i,
             ", expected 1, and from some pair on 1e20 or more");
    }
  }
  for (LayerConfig& layer : config.layers) {
    if (layer.kind != LayerKind::kFull) continue;
    if (pairs != layer.rope_dim / 2) {
      refuse(" has ", pairs, " values, expected ", layer.rope_dim / 2,
             " by rope.dimension_count");
    }
    layer.still_pairs = pairs - turning;
  }
}

// Whether the values of full layers are their keys: then files have no product
// for values.
bool KeysAreValues(GgufFile& file, const Family& family,
                   const ModelConfig& config) {
  if (!family.keys_may_be_values) return false;
  for (size_t i = 0; i < config.num_layers(); ++i) {
    if (config.layers[i].kind != LayerKind::kFull) continue;
    return !file.Find(StrCat("blk.", i, ".attn_v.weight"));
  }
  return false;
}

// Checks that values are as long as keys, in layers of each kind.
void CheckValueLengths(const MetadataReader& read, const ModelConfig& config) {
  const bool apart = FieldNamed("head_dim").Get(config).size() != 1;
  for (const LayerConfig& layer : config.layers) {
    const bool slides = layer.kind == LayerKind::kSliding &&
                        read.Has("attention.value_length_swa");
    // value_length is the key of full layers.
    if (layer.kind == LayerKind::kSliding && apart && !slides) continue;
    const size_t length = read.Size(
        slides ? "attention.value_length_swa" : "attention.value_length",
        layer.head_dim);
    if (length == layer.head_dim) continue;
    throw CorruptFile(StrCat(read.file().path(), ": value_length",
                             slides ? "_swa" : "", " is ", length,
                             ", expected key_length ", layer.head_dim));
  }
}

// Reads how many of the last layers have no keys and values of their own.
void ReadShared(const MetadataReader& read, ModelConfig& config) {
  const Family& family = read.family();
  constexpr const char* kKey = "attention.shared_kv_layers";
  const size_t layers = config.num_layers();
  size_t omitted = 0;
  if (read.named() != nullptr) {
    for (const LayerConfig& layer : read.named()->layers) {
      omitted += layer.shares_kv.has_value();
    }
  } else if (family.own_layers != 0 && layers > family.own_layers) {
    omitted = layers - family.own_layers;
  }
  const size_t shared = read.Size(kKey, omitted);
  if (family.drafts) {
    if (shared == 0 || shared == config.num_layers()) return;
    throw read.Refusal<CorruptFile>(kKey, " is ", shared, ", expected ",
                                    config.num_layers(),
                                    ", all layers of a drafter");
  }
  if (ShareKeysValues(shared, config)) return;
  throw read.Refusal<CorruptFile>(kKey, " is ", shared,
                                  ", expected layers of each kind before "
                                  "those");
}

// Gives cutoffs the family's number. Files state what their converter's
// arithmetic made of a share, which differs in the last digits.
void RoundCutoffs(const Family& family, ModelConfig& config) {
  for (LayerConfig& layer : config.layers) {
    if (std::abs(layer.sparsity_cutoff - family.sparsity_cutoff) < 1e-6) {
      layer.sparsity_cutoff = family.sparsity_cutoff;
    }
  }
}

// Refuses parts of models of this family that the forward pass does not have.
void RefuseOtherParts(const MetadataReader& read) {
  constexpr const char* kKey = "expert_count";
  const size_t count = read.Size(kKey, 0);
  if (count == 0 || read.family().may_have_experts) return;
  throw read.Refusal<Mismatch>(kKey, " is ", count,
                               ", expected 0: such models are not supported");
}

// Clears what files of models without experts may state all the same: how many
// are used, and their width.
void ForgetExperts(ModelConfig& config) {
  if (config.num_experts == 0) config.experts_used = config.expert_ffn_dim = 0;
}

// Reads what models of embeddings have besides: windows, which files state as
// twice the distance that is seen, and the products after the last layer.
void ReadEmbedding(const MetadataReader& read, ModelConfig& config) {
  GgufFile& file = read.file();
  const Family& family = read.family();
  if (!family.bidirectional) return;
  for (LayerConfig& layer : config.layers) {
    if (!read.Has("attention.sliding_window")) break;
    if (layer.kind == LayerKind::kSliding) layer.window = layer.window / 2 + 1;
  }
  const auto check = [&](const char* key, size_t found, size_t expected,
                         const char* what) {
    if (found == expected) return;
    throw read.Refusal<CorruptFile>(key, " is ", found, ", expected ", expected,
                                    what);
  };
  // Files that say it is a Gemma 3 do not state the length of vectors between
  // the products.
  if (file.GetString("general.architecture") != family.architecture) {
    config.dense_dim = RowsOf(file, "dense_2.weight");
  }
  constexpr const char* kPooling = "pooling_type";
  const size_t pooling = read.Size(kPooling, 1);
  // 0: the converter knew of none.
  if (pooling != 0) check(kPooling, pooling, 1, ", the mean of all positions");
  check("dense_2_feat_in", read.Size("dense_2_feat_in", config.hidden_size),
        config.hidden_size, " by embedding_length");
  check("dense_3_feat_in", read.Size("dense_3_feat_in", config.dense_dim),
        config.dense_dim, " by dense_2_feat_out");
  check("dense_3_feat_out", read.Size("dense_3_feat_out", config.hidden_size),
        config.hidden_size, " by embedding_length");
  for (const char* name : {"dense_2.weight", "dense_3.weight"}) {
    if (config.dense_dim != 0 || !file.Find(name)) continue;
    throw CorruptFile(StrCat(file.path(), ": found tensor ", name,
                             ", expected metadata ", family.architecture,
                             ".dense_2_feat_out with it"));
  }
}

// Reads which model a drafter guesses for. The format has no metadata for what
// chooses clusters of tokens, so all tokens have logits.
void ReadDrafter(const MetadataReader& read, ModelConfig& config) {
  if (!read.family().drafts) return;
  // A drafter's logits are never capped, whatever a file says.
  config.final_soft_cap = 0;
  constexpr const char* kKey = "embedding_length_out";
  config.target_hidden = read.Size(kKey, 0);
  if (config.target_hidden != 0) return;
  throw read.Refusal<CorruptFile>(kKey,
                                  " is missing, expected the hidden size of "
                                  "the model that this one guesses for");
}

// Returns the token that ends a reply in the earlier families, by its name;
// `fallback` if there is none.
int32_t FindEndOfTurn(const GgufFile& file, int32_t fallback) {
  constexpr const char* kTokens = "tokenizer.ggml.tokens";
  if (!file.Has(kTokens)) return fallback;
  const std::vector<std::string_view> pieces = *file.GetStrings(kTokens);
  const auto at = std::find(pieces.begin(), pieces.end(), "<end_of_turn>");
  return at == pieces.end() ? fallback
                            : static_cast<int32_t>(at - pieces.begin());
}

void ReadTokenIds(const GgufFile& file, const Family& family,
                  ModelConfig& config) {
  const auto checked = [&](const char* key, uint64_t value) {
    if (value >= config.vocab_size) {
      throw CorruptFile(StrCat(file.path(), ": metadata ", key, " is ", value,
                               ", expected a token id below ",
                               config.vocab_size));
    }
    return static_cast<int32_t>(value);
  };
  const auto id = [&](const char* key, int32_t fallback) {
    const std::optional<uint64_t> value = file.GetUint(key);
    return value ? checked(key, *value) : fallback;
  };
  config.bos_id = id("tokenizer.ggml.bos_token_id", 2);
  const int32_t eos = id("tokenizer.ggml.eos_token_id", 1);
  // <end_of_turn> ends a reply of the instruction-tuned models and is never
  // part of the text of the pretrained ones.
  constexpr const char* kEot = "tokenizer.ggml.eot_token_id";
  const int32_t end_of_turn = family.end_of_turn != 0 ? family.end_of_turn
                              : file.Has(kEot) || family.bidirectional
                                  ? eos
                                  : FindEndOfTurn(file, eos);
  const int32_t eot = id(kEot, end_of_turn);
  std::set<int32_t> ends = {eos};
  constexpr const char* kAll = "tokenizer.ggml.eos_token_ids";
  if (const auto all = file.GetInts(kAll)) {
    for (const int64_t other : *all) {
      ends.insert(checked(kAll, static_cast<uint64_t>(other)));
    }
  }
  const int32_t end_of_call =
      family.end_of_call == 0 ? eos : family.end_of_call;
  for (const int32_t other : {eot, end_of_call}) {
    if (static_cast<size_t>(other) < config.vocab_size) ends.insert(other);
  }
  config.eos_ids.assign(ends.begin(), ends.end());
}

// Whether this format has names for all of a family. It has none for recurrent
// layers, and for what EmbeddingGemma 2 has after its last one.
bool HasGgufNames(const Family& family) {
  return !HasRecurrentLayers(family) && family.embedding_dim == 0;
}

// Whether this is a file of EmbeddingGemma by Ollama. These call it a Gemma 3.
// A key of pooling or attention, and the tensor of its first product, tell.
bool IsEmbeddingOfGemma3(const GgufFile& file, std::string_view architecture) {
  const auto& tensors = file.tensors();
  return architecture == "gemma3" &&
         (file.Has("gemma3.pooling_type") ||
          file.GetBool("gemma3.attention.causal") == false) &&
         std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
           return tensor.name == "dense_2.weight";
         });
}

const Family& FamilyOf(const GgufFile& file) {
  CheckGgufKind(file);
  const std::optional<std::string_view> architecture =
      file.GetString("general.architecture");
  if (!architecture) {
    throw CorruptFile(
        StrCat(file.path(), ": metadata general.architecture is missing"));
  }
  if (IsEmbeddingOfGemma3(file, *architecture)) {
    return *FindFamily("gemma-embedding");
  }
  std::string known;
  for (const Family& family : Families()) {
    if (!HasGgufNames(family)) continue;
    if (family.architecture == *architecture) return family;
    known += StrCat(known.empty() ? "'" : ", '", family.architecture, "'");
  }
  const bool elsewhere = FindFamily(*architecture) != nullptr;
  throw Mismatch(StrCat(
      file.path(), ": the architecture is '", *architecture,
      "', expected one of ", known,
      elsewhere ? " (this one loads from its Hugging Face directory)" : ""));
}

}  // namespace

ModelConfig ConfigFromGguf(GgufFile& file) {
  const ScopedFpEnvironment fp_environment;
  const Family& family = FamilyOf(file);
  MetadataReader read(file, family);
  ModelConfig config;
  config.architecture = family.architecture;
  // First the fields that the family's part depends on, then all.
  read.Read(FieldNamed("hidden_size"), config);
  read.Read(FieldNamed("num_layers"), config);
  read.Read(FieldNamed("num_heads"), config);
  read.SetNamed(FindNamedLike(config));
  ApplyFamily(family, config);
  config.ple_dim = family.ple_dim;
  RefuseOtherParts(read);
  ReadKinds(read, config);
  for (LayerConfig& layer : config.layers) {
    layer.head_dim = layer.kind == LayerKind::kSliding ? family.sliding_head_dim
                                                       : family.full_head_dim;
  }
  if (!SameKinds(read.named(), config)) read.SetNamed(nullptr);
  read.Read(FieldNamed("head_dim"), config);
  if (!SameHeads(read.named(), config)) read.SetNamed(nullptr);
  ApplyFamilyToLayers(family, config);
  for (const Field& field : Fields()) {
    if (field.gguf != nullptr) read.Read(field, config);
  }
  // Without the key there is none, except where ReadEmbedding() goes by
  // tensors.
  if (!read.Has("dense_2_feat_out")) config.dense_dim = 0;
  ForgetExperts(config);
  RoundCutoffs(family, config);
  config.vocab_size = RowsOf(file, "token_embd.weight");
  if (config.ple_dim != 0) {
    config.ple_vocab = RowsOf(file, "per_layer_token_embd.weight");
  }
  if (family.laurel_rank != 0) {
    config.laurel_rank = RowsOf(file, "blk.0.laurel_l.weight");
  }
  ReadShared(read, config);
  CheckValueLengths(read, config);
  ReadStillPairs(file, family, config);
  config.keys_are_values = KeysAreValues(file, family, config);
  ReadEmbedding(read, config);
  ReadDrafter(read, config);
  config.query_scale = QueryScale(family, config);
  ReadRope(read, config);
  ReadTokenIds(file, family, config);
  try {
    config.Validate();
  } catch (const InvalidArgument& error) {
    throw CorruptFile(StrCat(file.path(), ": ", error.what()));
  }
  CheckGgufKeys(file, config);
  NameByShape(config);
  return config;
}

}  // namespace gkv
