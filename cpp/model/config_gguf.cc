// Configurations of GGUF files: what the metadata states, and for what it
// omits, what the family's files mean by that.

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "model/config.h"
#include "model/family.h"

namespace gkv {
namespace {

// Far above any model that exists, far below where size products overflow.
constexpr size_t kMaxSize = size_t{1} << 24;
constexpr size_t kMaxLayers = 4096;

// Reads a family's metadata keys, which all start with the architecture.
class MetadataReader {
 public:
  MetadataReader(const GgufFile& file, const Family& family)
      : file_(file), prefix_(StrCat(family.architecture, ".")) {}

  size_t Size(const char* key) const {
    const std::optional<uint64_t> value = file_.GetUint(prefix_ + key);
    if (!value) {
      throw CorruptFile(
          StrCat(file_.path(), ": metadata ", prefix_, key, " is missing"));
    }
    return Checked(key, *value);
  }
  size_t Size(const char* key, size_t fallback) const {
    const std::optional<uint64_t> value = file_.GetUint(prefix_ + key);
    return value ? Checked(key, *value) : fallback;
  }
  double Float(const char* key, double fallback) const {
    return file_.GetFloat(prefix_ + key).value_or(fallback);
  }
  // The values of an array; nullopt for a single value or none.
  std::optional<std::vector<int64_t>> Flags(const char* key) const {
    const std::optional<GgufValue> value = file_.Get(prefix_ + key);
    if (!value || !std::holds_alternative<GgufArray>(*value)) {
      return std::nullopt;
    }
    return file_.GetInts(prefix_ + key);
  }
  // Linear scaling of positions; 1 if there is none.
  double RopeFactor() const {
    const std::string type_key = prefix_ + "rope.scaling.type";
    const std::string_view type = file_.GetString(type_key).value_or("linear");
    if (type == "none") return 1;
    if (type != "linear") {
      throw Mismatch(StrCat(file_.path(), ": metadata ", type_key, " is '",
                            type, "', expected 'linear' or 'none'"));
    }
    return Float("rope.scaling.factor", 1);
  }

 private:
  size_t Checked(const char* key, uint64_t value) const {
    if (value > kMaxSize) {
      throw CorruptFile(StrCat(file_.path(), ": metadata ", prefix_, key,
                               " is ", value, ", expected at most ", kMaxSize));
    }
    return static_cast<size_t>(value);
  }

  const GgufFile& file_;
  std::string prefix_;
};

size_t VocabSize(const GgufFile& file) {
  for (const GgufFile::TensorInfo& tensor : file.tensors()) {
    if (tensor.name == "token_embd.weight" && tensor.shape.size() == 2 &&
        tensor.shape[1] <= kMaxSize) {
      return static_cast<size_t>(tensor.shape[1]);
    }
  }
  throw CorruptFile(StrCat(file.path(),
                           ": tensor token_embd.weight is missing, not a "
                           "matrix, or has too many rows"));
}

void ReadSizes(const GgufFile& file, const MetadataReader& read,
               ModelConfig& config) {
  config.hidden_size = read.Size("embedding_length");
  config.num_layers = read.Size("block_count");
  config.num_heads = read.Size("attention.head_count");
  config.kv_heads = read.Size("attention.head_count_kv", config.num_heads);
  config.head_dim = read.Size("attention.key_length", 256);
  const size_t value_dim = read.Size("attention.value_length", config.head_dim);
  if (value_dim != config.head_dim) {
    throw CorruptFile(StrCat(file.path(), ": value_length is ", value_dim,
                             ", expected key_length ", config.head_dim));
  }
  config.ffn_dim = read.Size("feed_forward_length");
  if (config.num_layers > kMaxLayers) {
    throw CorruptFile(StrCat(file.path(), ": block_count is ",
                             config.num_layers, ", expected at most ",
                             kMaxLayers));
  }
}

// Files do not say how queries are scaled. The sizes of the table do; others
// divide by the square root of head_dim.
double QueryScale(const ModelConfig& config) {
  for (const ModelConfig& named : NamedConfigs()) {
    if (named.architecture == config.architecture &&
        named.hidden_size == config.hidden_size &&
        named.num_layers == config.num_layers &&
        named.num_heads == config.num_heads &&
        named.head_dim == config.head_dim) {
      return named.query_scale;
    }
  }
  return 1.0 / std::sqrt(static_cast<double>(config.head_dim));
}

// A flag for each layer: whether it slides.
std::vector<LayerKind> KindsFromFlags(const GgufFile& file,
                                      const std::vector<int64_t>& slides,
                                      size_t num_layers) {
  if (slides.size() != num_layers) {
    throw CorruptFile(StrCat(file.path(), ": sliding_window_pattern has ",
                             slides.size(),
                             " entries, expected one for each "
                             "of ",
                             num_layers, " layers"));
  }
  std::vector<LayerKind> kinds;
  for (const int64_t flag : slides) {
    kinds.push_back(flag != 0 ? LayerKind::kSliding : LayerKind::kFull);
  }
  return kinds;
}

void ReadLayers(const GgufFile& file, const MetadataReader& read,
                const Family& family, ModelConfig& config) {
  if (!HasSlidingLayers(family)) return;
  config.sliding_window =
      read.Size("attention.sliding_window", family.sliding_window);
  if (config.sliding_window == 0 && family.sliding_window == 0) {
    // Where sizes have windows of their own, a file without one says that no
    // layer slides.
    config.layer_kinds.assign(config.num_layers, LayerKind::kFull);
    config.rope_base_sliding = 0;
    return;
  }
  if (const auto slides = read.Flags("attention.sliding_window_pattern")) {
    config.layer_kinds = KindsFromFlags(file, *slides, config.num_layers);
    return;
  }
  const size_t period =
      read.Size("attention.sliding_window_pattern", family.pattern.size());
  if (period == 0) {
    throw CorruptFile(
        StrCat(file.path(), ": sliding_window_pattern is 0, expected >= 1"));
  }
  config.layer_kinds = PeriodicLayerKinds(config.num_layers, period);
}

void ReadRope(const GgufFile& file, const MetadataReader& read,
              const Family& family, ModelConfig& config) {
  config.rope_dim = read.Size("rope.dimension_count", config.head_dim);
  config.rope_base_full = read.Float("rope.freq_base", family.rope_base_full);
  config.rope_factor_full = read.RopeFactor();
  if (config.sliding_window == 0) return;
  // Where both kinds rotate alike, files state one base for both.
  const bool alike = family.rope_base_full == family.rope_base_sliding;
  config.rope_base_sliding =
      read.Float("rope.freq_base_swa",
                 alike ? config.rope_base_full : family.rope_base_sliding);
  if (alike && config.rope_factor_full != 1) {
    throw Mismatch(StrCat(file.path(), ": metadata ", family.architecture,
                          ".rope.scaling.factor is ", config.rope_factor_full,
                          ", expected 1 for this architecture"));
  }
}

void ReadTokenIds(const GgufFile& file, const Family& family,
                  ModelConfig& config) {
  const auto id = [&](const char* key, int32_t fallback) {
    const std::optional<uint64_t> value = file.GetUint(key);
    if (!value) return fallback;
    if (*value >= config.vocab_size) {
      throw CorruptFile(StrCat(file.path(), ": metadata ", key, " is ", *value,
                               ", expected a token id below ",
                               config.vocab_size));
    }
    return static_cast<int32_t>(*value);
  };
  config.bos_id = id("tokenizer.ggml.bos_token_id", 2);
  const int32_t eos = id("tokenizer.ggml.eos_token_id", 1);
  // <end_of_turn> ends a reply of the instruction-tuned models and is never
  // part of the text of the pretrained ones.
  const int32_t end_of_turn =
      family.end_of_turn == 0 ? eos : family.end_of_turn;
  const int32_t eot = id("tokenizer.ggml.eot_token_id", end_of_turn);
  config.eos_ids = {eos};
  if (eot != eos && static_cast<size_t>(eot) < config.vocab_size) {
    config.eos_ids.push_back(eot);
  }
  std::sort(config.eos_ids.begin(), config.eos_ids.end());
}

// Recurrent layers have no names in this format.
bool InGguf(const Family& family) { return !HasRecurrentLayers(family); }

const Family& FamilyOf(const GgufFile& file) {
  const std::optional<std::string_view> architecture =
      file.GetString("general.architecture");
  if (!architecture) {
    throw CorruptFile(
        StrCat(file.path(), ": metadata general.architecture is missing"));
  }
  std::string known;
  for (const Family& family : Families()) {
    if (!InGguf(family)) continue;
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

ModelConfig ConfigFromGguf(const GgufFile& file) {
  const Family& family = FamilyOf(file);
  const MetadataReader read(file, family);
  ModelConfig config;
  ReadSizes(file, read, config);
  ApplyFamily(family, config);
  config.vocab_size = VocabSize(file);
  config.context_length = read.Size("context_length");
  config.rms_epsilon =
      static_cast<float>(read.Float("attention.layer_norm_rms_epsilon", 1e-6));
  config.query_scale = QueryScale(config);
  config.attn_soft_cap = static_cast<float>(
      read.Float("attn_logit_softcapping", family.attn_soft_cap));
  config.final_soft_cap = static_cast<float>(
      read.Float("final_logit_softcapping", family.final_soft_cap));
  ReadLayers(file, read, family, config);
  ReadRope(file, read, family, config);
  ReadTokenIds(file, family, config);
  try {
    config.Validate();
  } catch (const InvalidArgument& error) {
    throw CorruptFile(StrCat(file.path(), ": ", error.what()));
  }
  NameByShape(config);
  return config;
}

}  // namespace gkv
