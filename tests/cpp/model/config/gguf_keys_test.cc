#include "model/config/gguf_keys.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "io/gguf_builder.h"

namespace gkv {
namespace {

ModelConfig Named(std::string_view name) {
  return ConfigOf(ModelTypeFromName(std::string(name)));
}

// Of the Mismatch that the keys of a file are refused with; "" for none.
std::string MessageOf(const ModelConfig& config, GgufBuilder builder,
                      std::string_view architecture = "") {
  builder.Set("general.architecture",
              architecture.empty() ? std::string_view(config.architecture)
                                   : architecture);
  const std::vector<uint8_t> bytes = builder.Build();
  const GgufFile file(bytes, "test.gguf");
  try {
    CheckGgufKeys(file, config);
  } catch (const Mismatch& error) {
    return error.what();
  }
  return "";
}

template <typename T>
std::string MessageOf(const ModelConfig& config, std::string_view key,
                      T value) {
  return MessageOf(
      config,
      GgufBuilder().Set(config.architecture + "." + std::string(key), value));
}

TEST(GgufKeysTest, UnknownKeysOfTheArchitectureAreNamed) {
  const ModelConfig config = Named("gemma3-270m");
  for (const char* key :
       {"attention.max_alibi_bias", "attention.unheard_of", "ssm.state_size",
        "logit_scale", "residual_scale", "classifier.output_labels", "x"}) {
    const std::string message = MessageOf(config, key, 1.0f);
    EXPECT_NE(message.find("test.gguf: found metadata gemma3." +
                           std::string(key) + ", expected none"),
              std::string::npos)
        << message;
  }
}

// What converters write for each family, beside what WhatIsSaidTwiceMustAgree
// tries: those of llama.cpp, and those of Ollama.
TEST(GgufKeysTest, KeysOfConvertersAreKnown) {
  const std::vector<std::string> all = {"context_length",
                                        "embedding_length",
                                        "block_count",
                                        "feed_forward_length",
                                        "attention.head_count",
                                        "attention.head_count_kv",
                                        "attention.layer_norm_rms_epsilon",
                                        "attention.key_length",
                                        "attention.value_length"};
  const std::vector<std::string> sliding = {
      "attention.sliding_window", "attention.sliding_window_pattern",
      "rope.freq_base",           "rope.freq_base_swa",
      "rope.scaling.type",        "rope.scaling.factor"};
  const std::vector<std::string> by_kind = {
      "attention.key_length_swa",   "attention.value_length_swa",
      "attention.shared_kv_layers", "rope.dimension_count",
      "rope.dimension_count_swa",   "embedding_length_per_layer_input",
      "final_logit_softcapping"};
  struct Converted {
    const char* name;
    std::vector<std::string> more;
  };
  const Converted converted[] = {
      {"gemma-2b", {"vocab_size", "rope.dimension_count"}},
      {"gemma2-2b", {"attn_logit_softcapping", "final_logit_softcapping"}},
      {"gemma3-4b",
       {"final_logit_softcapping", "mm.tokens_per_image", "vision.block_count",
        "vision.attention.head_count", "vision.projector.scale_factor",
        "rope.scaling.original_context_length"}},
      {"gemma3n-e4b",
       {"altup.active_idx", "altup.num_inputs", "altup.lr_multiplier",
        "activation_sparsity_scale", "embedding_length_per_layer_input",
        "attention.shared_kv_layers"}},
      {"gemma4-e2b", {"vision.block_count", "audio.conv_kernel_size"}},
      {"gemma4-26b-a4b",
       {"expert_count", "expert_used_count", "expert_feed_forward_length"}},
      {"embeddinggemma-300m",
       {"pooling_type", "dense_2_feat_in", "dense_2_feat_out",
        "dense_3_feat_in", "dense_3_feat_out"}},
  };
  for (const auto& [name, more] : converted) {
    const ModelConfig config = Named(name);
    GgufBuilder builder;
    const auto add = [&](const std::vector<std::string>& keys) {
      for (const std::string& key : keys) {
        builder.Set(config.architecture + "." + key, 1);
      }
    };
    add(all);
    add(more);
    if (config.HasLayers(LayerKind::kSliding)) add(sliding);
    if (config.architecture == "gemma4") add(by_kind);
    EXPECT_EQ(MessageOf(config, builder), "");
  }
  ModelConfig drafter = Named("gemma4-e2b");
  drafter.architecture = "gemma4-assistant";
  drafter.target_hidden = 1536;
  GgufBuilder builder;
  for (const char* key : {"embedding_length_out", "nextn_predict_layers"}) {
    builder.Set("gemma4-assistant." + std::string(key), 1536);
  }
  EXPECT_EQ(MessageOf(drafter, builder), "");
}

TEST(GgufKeysTest, KeysOfOthersMayBeAny) {
  const ModelConfig config = Named("gemma3-270m");
  GgufBuilder builder;
  for (const char* key :
       {"general.x", "tokenizer.ggml.x", "quantize.imatrix.file",
        "someone.quantized_by", "gemma-embedding.x", "gemma3n.x", "gemma3",
        "gemma3.vision.block_count", "gemma3.audio.block_count",
        "gemma3.mm.tokens_per_image"}) {
    builder.Set(key, 1);
  }
  EXPECT_EQ(MessageOf(config, builder), "");
}

TEST(GgufKeysTest, KeysWithoutEffectMayHaveAnyValue) {
  const ModelConfig config = Named("gemma3n-e2b");
  GgufBuilder builder;
  for (const char* key :
       {"vocab_size", "attention.layer_norm_epsilon", "altup.lr_multiplier",
        "rope.scaling.original_context_length", "rope.scaling.finetuned",
        "block_count", "rope.freq_base", "attention.value_length"}) {
    builder.Set("gemma3n." + std::string(key), 1);
  }
  EXPECT_EQ(MessageOf(config, builder), "");
}

// They are so in files that llama.cpp saves after training.
TEST(GgufKeysTest, KeysOfWhatNoGemmaHasMayBeZero) {
  const ModelConfig config = Named("gemma3-270m");
  for (const char* key :
       {"attention.max_alibi_bias", "attention.scale", "embedding_scale",
        "ssm.state_size", "logit_scale", "residual_scale"}) {
    EXPECT_EQ(MessageOf(config, key, 0.0f), "");
    EXPECT_EQ(MessageOf(config, key, 0), "");
    EXPECT_NE(MessageOf(config, key, 2.0f), "") << key;
    EXPECT_NE(MessageOf(config, key, "0"), "") << key;
  }
  EXPECT_EQ(MessageOf(config, "swin_norm", false), "");
  EXPECT_NE(MessageOf(config, "swin_norm", true), "");
}

TEST(GgufKeysTest, WhatIsSaidTwiceMustAgree) {
  const ModelConfig config = Named("gemma3n-e2b");
  EXPECT_EQ(MessageOf(config, "head_dim", 256), "");
  EXPECT_EQ(MessageOf(config, "rope.freq_base_local", 1e4f), "");
  EXPECT_EQ(MessageOf(config, "rope.global.freq_base", 1e6f), "");
  EXPECT_EQ(MessageOf(config, "altup.correct_scale", true), "");
  EXPECT_EQ(MessageOf(config, "rope.scale_linear", 1.0f), "");
  EXPECT_EQ(MessageOf(config, "rope.scaling.attn_factor", 1.0f), "");
  EXPECT_EQ(MessageOf(config, "nextn_predict_layers", 0), "");
  EXPECT_EQ(MessageOf(config, "embedding_scale",
                      static_cast<float>(config.embedding_scale)),
            "");
  EXPECT_NE(MessageOf(config, "head_dim", 128)
                .find("gemma3n.head_dim is 128, expected 256"),
            std::string::npos);
  EXPECT_NE(
      MessageOf(config, "rope.freq_base_local", 2e4f).find("expected 10000"),
      std::string::npos);
  EXPECT_NE(MessageOf(config, "altup.correct_scale", false)
                .find("altup.correct_scale is 0, expected 1"),
            std::string::npos);
  EXPECT_NE(MessageOf(config, "rope.scale_linear", 4.0f), "");
  EXPECT_NE(MessageOf(config, "rope.scaling.attn_factor", 0.5f), "");
  EXPECT_NE(MessageOf(config, "nextn_predict_layers", 1), "");
  EXPECT_NE(MessageOf(config, "head_dim", std::string_view("256"))
                .find("head_dim is no number"),
            std::string::npos);
}

TEST(GgufKeysTest, WhetherAModelGeneratesIsNotPassedOver) {
  const ModelConfig generates = Named("gemma3-270m");
  EXPECT_EQ(MessageOf(generates, "attention.causal", true), "");
  EXPECT_EQ(MessageOf(generates, "pooling_type", 0), "");
  EXPECT_NE(MessageOf(generates, "attention.causal", false)
                .find("gemma3.attention.causal is 0, expected 1"),
            std::string::npos);
  EXPECT_NE(MessageOf(generates, "pooling_type", 3)
                .find("gemma3.pooling_type is 3, expected 0"),
            std::string::npos);
  EXPECT_NE(MessageOf(generates, "dense_3_feat_in", 3072), "");
  const ModelConfig embeds = Named("embeddinggemma-300m");
  EXPECT_EQ(MessageOf(embeds, "attention.causal", false), "");
  EXPECT_EQ(MessageOf(embeds, "pooling_type", 1), "");
  EXPECT_NE(MessageOf(embeds, "attention.causal", true), "");
  // By whatever architecture the file calls it.
  EXPECT_NE(
      MessageOf(embeds, GgufBuilder().Set("gemma3.attention.causal", true),
                "gemma3"),
      "");
}

TEST(GgufKeysTest, WhatAFileHoldsIsAModel) {
  const auto message = [](GgufBuilder builder) -> std::string {
    const std::vector<uint8_t> bytes = builder.Build();
    const GgufFile file(bytes, "test.gguf");
    try {
      CheckGgufKind(file);
    } catch (const Mismatch& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(GgufBuilder()), "");
  EXPECT_EQ(message(GgufBuilder().Set("general.type", "model")), "");
  EXPECT_NE(message(GgufBuilder().Set("general.type", "adapter"))
                .find("adapters are not supported; merge it"),
            std::string::npos);
  EXPECT_NE(message(GgufBuilder().Set("general.type", "imatrix"))
                .find("general.type is 'imatrix', expected 'model'"),
            std::string::npos);
}

}  // namespace
}  // namespace gkv
