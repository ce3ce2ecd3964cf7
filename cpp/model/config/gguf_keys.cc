#include "model/config/gguf_keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/error.h"
#include "model/config/fields.h"

namespace gkv {
namespace {

// Keys that the reader of configurations reads besides those of fields.
constexpr std::string_view kRead[] = {
    "attention.shared_kv_layers",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attention.value_length_swa",
    "rope.scaling.factor",
    "rope.scaling.type",
};

// The same in models of embeddings, and in drafters.
constexpr std::string_view kReadInEmbeddings[] = {
    "dense_2_feat_in",  "dense_2_feat_out", "dense_3_feat_in",
    "dense_3_feat_out", "pooling_type",
};
constexpr std::string_view kReadInDrafters[] = {
    "embedding_length_out",
    "nextn_predict_layers",
};

// Keys whose value does not change what a Gemma computes.
constexpr std::string_view kWithoutEffect[] = {
    "altup.lr_multiplier",                // of training
    "attention.layer_norm_epsilon",       // no norm subtracts a mean
    "decoder_start_token_id",             // there is no encoder before it
    "expert_shared_feed_forward_length",  // of expert_shared_count experts
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "vocab_size",  // the embedding has this many rows
};

// Keys that may be 0, where nothing is stated or where a model has nothing of
// what they switch on. llama.cpp writes all of them into each file that it
// saves after training.
constexpr std::string_view kMayBeZero[] = {
    "attention.clamp_kqv",
    "attention.kv_lora_rank",
    "attention.max_alibi_bias",
    "attention.q_lora_rank",
    "attention.relative_buckets_count",
    "attention.scale",
    "embedding_scale",
    "expert_group_used_count",
    "expert_weights_scale",
    "leading_dense_block_count",
    "logit_scale",
    "rescale_every_n_layers",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
    "ssm.conv_kernel",
    "ssm.dt_b_c_rms",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "swin_norm",
    "time_decay_extra_dim",
    "time_mix_extra_dim",
    "use_parallel_residual",
    "wkv.head_size",
};

// Encoders of images and sound.
constexpr std::string_view kOtherParts[] = {"vision.", "audio.", "mm."};

double Zero(const ModelConfig&) { return 0; }
double One(const ModelConfig&) { return 1; }

// Keys that say in another way what a field says, or that switch on what no
// Gemma has, and the value that they must have.
constexpr struct {
  std::string_view key;
  double (*expected)(const ModelConfig& config);
} kFixed[] = {
    {"attention.causal",
     [](const ModelConfig& config) {
       return config.bidirectional ? 0.0 : 1.0;
     }},
    {"embedding_length_out",
     [](const ModelConfig& config) {
       return static_cast<double>(config.hidden_size);
     }},
    {"expert_group_count", Zero},
    {"expert_shared_count", Zero},
    {"nextn_predict_layers", Zero},
    {"pooling_type", Zero},
    {"rope.scale_linear",
     [](const ModelConfig& config) {
       return FieldNamed("rope_factor_full").Get(config)[0];
     }},
    {"rope.scaling.attn_factor", One},
};

template <typename Keys>
bool IsAmong(const Keys& keys, std::string_view key) {
  return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
}

bool IsRead(std::string_view key, const ModelConfig& config) {
  if (IsAmong(kReadInEmbeddings, key)) return config.bidirectional;
  if (IsAmong(kReadInDrafters, key)) return config.target_hidden != 0;
  if (IsAmong(kRead, key)) return true;
  for (const Field& field : Fields()) {
    if (field.gguf == nullptr || !key.starts_with(field.gguf)) continue;
    const std::string_view rest = key.substr(std::strlen(field.gguf));
    if (rest.empty() || (field.gguf_swa && rest == "_swa")) return true;
  }
  return false;
}

// Returns the value that the key must have; nullopt for any. Throws Mismatch
// for a key that is not known.
std::optional<double> ExpectedOf(const GgufFile& file, const std::string& full,
                                 std::string_view key,
                                 const ModelConfig& config) {
  for (const Field& field : Fields()) {
    for (const char* const also : field.gguf_also) {
      if (also != nullptr && key == also) return field.First(config);
    }
  }
  for (const auto& row : kFixed) {
    if (key == row.key) return row.expected(config);
  }
  throw Mismatch(StrCat(file.path(), ": found metadata ", full,
                        ", expected none of this name: what it changes in a ",
                        config.architecture, " model is not known"));
}

// Returns a number or a flag; nullopt for anything else.
std::optional<double> NumberOf(const GgufValue& value) {
  return std::visit(
      [](const auto& v) -> std::optional<double> {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(v)>>) {
          return static_cast<double>(v);
        } else {
          return std::nullopt;
        }
      },
      value);
}

// Whether two numbers are the same, of which a file has one in 32 bits.
bool SameNumber(double a, double b) {
  return std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b));
}

void CheckFixed(const GgufFile& file, const std::string& key, double expected) {
  const std::optional<double> found = NumberOf(*file.Get(key));
  if (found && SameNumber(*found, expected)) return;
  throw Mismatch(StrCat(file.path(), ": metadata ", key, " is ",
                        found ? StrCat(*found) : std::string("no number"),
                        ", expected ", expected,
                        ": a model that computes otherwise is not supported"));
}

}  // namespace

void CheckGgufKind(const GgufFile& file) {
  const std::string_view kind =
      file.GetString("general.type").value_or("model");
  if (kind == "model") return;
  throw Mismatch(StrCat(file.path(), ": metadata general.type is '",
                        OneLine(kind), "', expected 'model'",
                        kind == "adapter"
                            ? ": adapters are not supported; merge it into the "
                              "model that it was made for, or load that alone"
                            : ""));
}

void CheckGgufKeys(const GgufFile& file, const ModelConfig& config) {
  const std::string prefix =
      StrCat(file.GetString("general.architecture").value_or(""), ".");
  for (const std::string& full : file.Keys()) {
    if (!full.starts_with(prefix)) continue;
    const std::string_view key = std::string_view(full).substr(prefix.size());
    if (IsRead(key, config) || IsAmong(kWithoutEffect, key) ||
        std::any_of(
            std::begin(kOtherParts), std::end(kOtherParts),
            [&](std::string_view part) { return key.starts_with(part); })) {
      continue;
    }
    if (IsAmong(kMayBeZero, key) && NumberOf(*file.Get(full)) == 0.0) continue;
    if (const auto expected = ExpectedOf(file, full, key, config)) {
      CheckFixed(file, full, *expected);
    }
  }
}

}  // namespace gkv
