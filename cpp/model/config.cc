#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace gkv {
namespace {

// Far above any model that exists, far below where size products overflow.
constexpr size_t kMaxSize = size_t{1} << 24;

void CheckRange(const char* name, size_t value, size_t low, size_t high) {
  if (value < low || value > high) {
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected ", low, "..", high));
  }
}

void CheckFinite(const char* name, double value, double low) {
  if (!std::isfinite(value) || value < low) {
    throw InvalidArgument(StrCat("model config: ", name, " is ", value,
                                 ", expected a finite number >= ", low));
  }
}

// Reads a family's metadata keys, which all start with the architecture.
class MetadataReader {
 public:
  MetadataReader(const GgufFile& file, std::string prefix)
      : file_(file), prefix_(std::move(prefix)) {}

  size_t Size(const char* key) const {
    const std::optional<uint64_t> value = file_.GetUint(prefix_ + key);
    if (!value) Missing(key);
    return Checked(key, *value);
  }
  size_t Size(const char* key, size_t fallback) const {
    const std::optional<uint64_t> value = file_.GetUint(prefix_ + key);
    return value ? Checked(key, *value) : fallback;
  }
  double Float(const char* key, double fallback) const {
    return file_.GetFloat(prefix_ + key).value_or(fallback);
  }

 private:
  size_t Checked(const char* key, uint64_t value) const {
    if (value > kMaxSize) {
      throw CorruptFile(StrCat(file_.path(), ": metadata ", prefix_, key,
                               " is ", value, ", expected at most ", kMaxSize));
    }
    return static_cast<size_t>(value);
  }
  [[noreturn]] void Missing(const char* key) const {
    throw CorruptFile(
        StrCat(file_.path(), ": metadata ", prefix_, key, " is missing"));
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

ModelConfig Gemma3FromGguf(const GgufFile& file) {
  const MetadataReader read(file, "gemma3.");
  ModelConfig config;
  config.architecture = "gemma3";
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
  config.vocab_size = VocabSize(file);
  config.context_length = read.Size("context_length");
  config.sliding_window = read.Size("attention.sliding_window");
  config.rms_epsilon =
      static_cast<float>(read.Float("attention.layer_norm_rms_epsilon", 1e-6));
  // The 27B model divides by hidden_size / num_heads instead of head_dim;
  // files do not say so.
  const bool by_hidden = config.num_layers == 62;
  config.query_scale =
      1.0 / std::sqrt(by_hidden ? static_cast<double>(config.hidden_size) /
                                      static_cast<double>(config.num_heads)
                                : static_cast<double>(config.head_dim));
  config.final_soft_cap =
      static_cast<float>(read.Float("final_logit_softcapping", 0));
  config.attn_soft_cap =
      static_cast<float>(read.Float("attn_logit_softcapping", 0));
  config.rope_base_full = read.Float("rope.freq_base", 1e6);
  config.rope_base_sliding = read.Float("rope.freq_base_swa", 1e4);
  config.rope_factor_full = read.Float("rope.scaling.factor", 1);
  config.qk_norm = true;
  config.post_norms = true;
  const size_t period = read.Size("attention.sliding_window_pattern", 6);
  if (period == 0) {
    throw CorruptFile(
        StrCat(file.path(), ": sliding_window_pattern is 0, expected >= 1"));
  }
  if (config.num_layers > 4096) {
    throw CorruptFile(StrCat(file.path(), ": block_count is ",
                             config.num_layers, ", expected at most 4096"));
  }
  config.layer_kinds = PeriodicLayerKinds(config.num_layers, period);
  return config;
}

void ReadTokenIds(const GgufFile& file, ModelConfig& config) {
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
  const int32_t eot = id("tokenizer.ggml.eot_token_id", 106);
  config.eos_ids = {eos};
  if (eot != eos && static_cast<size_t>(eot) < config.vocab_size) {
    config.eos_ids.push_back(eot);
  }
  std::sort(config.eos_ids.begin(), config.eos_ids.end());
}

}  // namespace

void ModelConfig::Validate() const {
  CheckRange("hidden_size", hidden_size, 1, kMaxSize);
  CheckRange("num_layers", num_layers, 1, 4096);
  CheckRange("num_heads", num_heads, 1, 4096);
  CheckRange("kv_heads", kv_heads, 1, num_heads);
  CheckRange("head_dim", head_dim, 32, 512);
  CheckRange("ffn_dim", ffn_dim, 1, kMaxSize);
  CheckRange("vocab_size", vocab_size, 1, kMaxSize);
  CheckRange("context_length", context_length, 1, kMaxSize);
  if (num_heads % kv_heads != 0) {
    throw InvalidArgument(StrCat("model config: num_heads is ", num_heads,
                                 ", expected a multiple of kv_heads ",
                                 kv_heads));
  }
  if (head_dim % 32 != 0) {
    throw InvalidArgument(StrCat("model config: head_dim is ", head_dim,
                                 ", expected a multiple of 32"));
  }
  if (num_heads / kv_heads > 16) {
    throw InvalidArgument(StrCat("model config: ", num_heads / kv_heads,
                                 " query heads share a kv head, expected at "
                                 "most 16"));
  }
  if (layer_kinds.size() != num_layers) {
    throw InvalidArgument(StrCat("model config: layer_kinds has ",
                                 layer_kinds.size(), " entries, expected ",
                                 num_layers));
  }
  const bool slides = std::find(layer_kinds.begin(), layer_kinds.end(),
                                LayerKind::kSliding) != layer_kinds.end();
  if (slides) CheckRange("sliding_window", sliding_window, 1, kMaxSize);
  CheckFinite("rms_epsilon", rms_epsilon, 0);
  CheckFinite("query_scale", query_scale, 0);
  CheckFinite("attn_soft_cap", attn_soft_cap, 0);
  CheckFinite("final_soft_cap", final_soft_cap, 0);
  CheckFinite("rope_base_full", rope_base_full, 1.001);
  if (slides) CheckFinite("rope_base_sliding", rope_base_sliding, 1.001);
  CheckFinite("rope_factor_full", rope_factor_full, 1);
  for (const int32_t id : eos_ids) {
    if (id < 0 || static_cast<size_t>(id) >= vocab_size) {
      throw InvalidArgument(StrCat("model config: eos id ", id,
                                   ", expected 0..", vocab_size - 1));
    }
  }
}

std::shared_ptr<const KvLayout> ModelConfig::MakeKvLayout(
    KvDtype dtype, size_t block_tokens) const {
  std::vector<KvLayerSpec> specs;
  for (const LayerKind kind : layer_kinds) {
    specs.push_back({kind, kv_heads, head_dim,
                     kind == LayerKind::kSliding ? sliding_window : 0});
  }
  return std::make_shared<KvLayout>(std::move(specs), dtype, block_tokens);
}

Hash128 ModelConfig::Hash() const {
  Hasher hasher;
  hasher.Update({reinterpret_cast<const uint8_t*>(architecture.data()),
                 architecture.size()});
  for (const size_t value : {hidden_size, num_layers, num_heads, kv_heads,
                             head_dim, ffn_dim, vocab_size, sliding_window}) {
    hasher.UpdateValue(static_cast<uint64_t>(value));
  }
  for (const LayerKind kind : layer_kinds) {
    hasher.UpdateValue(static_cast<uint32_t>(kind));
  }
  for (const double value :
       {static_cast<double>(rms_epsilon), query_scale,
        static_cast<double>(attn_soft_cap), static_cast<double>(final_soft_cap),
        rope_base_full, rope_base_sliding, rope_factor_full,
        static_cast<double>(qk_norm), static_cast<double>(post_norms)}) {
    hasher.UpdateValue(value);
  }
  return hasher.Finish();
}

bool ModelConfig::SameShape(const ModelConfig& other) const {
  return Hash() == other.Hash() && context_length == other.context_length;
}

ModelConfig ConfigFromGguf(const GgufFile& file) {
  const std::optional<std::string_view> architecture =
      file.GetString("general.architecture");
  if (!architecture) {
    throw CorruptFile(
        StrCat(file.path(), ": metadata general.architecture is missing"));
  }
  if (*architecture != "gemma3") {
    throw Mismatch(StrCat(file.path(), ": the architecture is '", *architecture,
                          "', expected 'gemma3'"));
  }
  ModelConfig config = Gemma3FromGguf(file);
  ReadTokenIds(file, config);
  try {
    config.Validate();
  } catch (const InvalidArgument& error) {
    throw CorruptFile(StrCat(file.path(), ": ", error.what()));
  }
  for (const ModelConfig& named : NamedConfigs()) {
    if (config.SameShape(named)) config.name = named.name;
  }
  return config;
}

}  // namespace gkv
