#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/gguf_builder.h"
#include "model/create_kv_cache.h"

namespace gkv {
namespace {

// Metadata of a file with the shape of `config`.
GgufBuilder BuilderFor(const ModelConfig& config) {
  GgufBuilder builder;
  const std::string prefix = config.architecture + ".";
  const auto size = [&](const char* key, size_t value) {
    builder.Set(prefix + key, static_cast<uint32_t>(value));
  };
  builder.Set("general.architecture", config.architecture)
      .Set(prefix + "attention.layer_norm_rms_epsilon", 1e-6f)
      .Set(prefix + "rope.freq_base",
           static_cast<float>(config.rope_base_full));
  size("embedding_length", config.hidden_size);
  size("block_count", config.num_layers);
  size("attention.head_count", config.num_heads);
  size("attention.head_count_kv", config.kv_heads);
  size("attention.key_length", config.head_dim);
  size("attention.value_length", config.head_dim);
  size("feed_forward_length", config.ffn_dim);
  size("context_length", config.context_length);
  size("attention.sliding_window", config.sliding_window);
  return builder;
}

ModelConfig Load(GgufBuilder builder, size_t vocab_size = 262144) {
  const std::vector<uint8_t> data(32);
  builder.AddRaw("token_embd.weight", 99, {640, vocab_size}, data);
  const std::vector<uint8_t> bytes = builder.Build();
  return ConfigFromGguf(GgufFile(bytes, "test.gguf"));
}

TEST(ConfigTest, NamedTypesAreSoundAndFoundByName) {
  for (const ModelConfig& config : NamedConfigs()) {
    EXPECT_NO_THROW(config.Validate()) << config.name;
    EXPECT_EQ(ConfigOf(ModelTypeFromName(config.name)).name, config.name);
  }
  try {
    ModelTypeFromName("gemma9-1t");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("gemma3-270m"), std::string::npos);
  }
}

TEST(ConfigTest, PublishedShapeOf270M) {
  const ModelConfig& config = ConfigOf(ModelType::kGemma3_270M);
  EXPECT_EQ(config.num_layers, 18u);
  EXPECT_EQ(config.layer_kinds[4], LayerKind::kSliding);
  EXPECT_EQ(config.layer_kinds[5], LayerKind::kFull);
  EXPECT_EQ(config.layer_kinds[17], LayerKind::kFull);
  EXPECT_EQ(config.query_scale, 1.0 / 16);
  const auto layout = config.MakeKvLayout(KvDtype::kBF16, 64);
  EXPECT_EQ(layout->groups()[0].layers.size(), 15u);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 3u * 1024);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding), 15u * 1024);
}

TEST(ConfigTest, FilesOfNamedShapesCarryTheName) {
  for (const ModelConfig& config : NamedConfigs()) {
    if (config.lru_width != 0) continue;
    GgufBuilder builder = BuilderFor(config);
    if (config.rope_factor_full != 1) {
      builder.Set("gemma3.rope.scaling.factor",
                  static_cast<float>(config.rope_factor_full));
    }
    const ModelConfig loaded = Load(builder, config.vocab_size);
    EXPECT_EQ(loaded.name, config.name);
    EXPECT_EQ(loaded.eos_ids, config.eos_ids);
    EXPECT_EQ(loaded.Hash(), config.Hash());
  }
}

TEST(ConfigTest, TheFileWinsOverTheTable) {
  ModelConfig config = ConfigOf(ModelType::kGemma3_270M);
  config.sliding_window = 256;
  const ModelConfig loaded = Load(BuilderFor(config));
  EXPECT_EQ(loaded.sliding_window, 256u);
  EXPECT_TRUE(loaded.name.empty());
  EXPECT_FALSE(loaded.SameShape(ConfigOf(ModelType::kGemma3_270M)));
}

TEST(ConfigTest, AnotherPaddingOfTheVocabularyIsTheSameType) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma3_4B);
  GgufBuilder builder = BuilderFor(table);
  builder.Set("gemma3.rope.scaling.type", "linear")
      .Set("gemma3.rope.scaling.factor", 8.0f);
  const ModelConfig loaded = Load(builder, 262208);
  EXPECT_EQ(loaded.name, "gemma3-4b");
  EXPECT_EQ(loaded.vocab_size, 262208u);
  EXPECT_NE(loaded.Hash(), table.Hash()) << "other weights, other identity";
}

TEST(ConfigTest, FilesOfGemma2MayOmitWindowCapsAndBase) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma2_9B);
  GgufBuilder builder;
  builder.Set("general.architecture", "gemma2");
  for (const auto& [key, value] : std::vector<std::pair<std::string, uint32_t>>{
           {"embedding_length", 3584},
           {"block_count", 42},
           {"attention.head_count", 16},
           {"attention.head_count_kv", 8},
           {"feed_forward_length", 14336},
           {"context_length", 8192}}) {
    builder.Set("gemma2." + key, value);
  }
  const ModelConfig loaded = Load(builder, 256000);
  EXPECT_EQ(loaded.name, "gemma2-9b");
  EXPECT_EQ(loaded.Hash(), table.Hash());
  EXPECT_EQ(loaded.sliding_window, 4096u);
  EXPECT_EQ(loaded.attn_soft_cap, 50);
  EXPECT_EQ(loaded.final_soft_cap, 30);
  EXPECT_EQ(loaded.layer_kinds[0], LayerKind::kSliding);
  EXPECT_EQ(loaded.layer_kinds[1], LayerKind::kFull);
  EXPECT_EQ(loaded.eos_ids, (std::vector<int32_t>{1, 107}));
}

TEST(ConfigTest, WhatNoLayerReadsIsNoPartOfTheIdentity) {
  ModelConfig full = ConfigOf(ModelType::kGemma_2B);
  full.rope_base_sliding = 1e4;
  full.sliding_window = 512;
  EXPECT_TRUE(full.SameShape(ConfigOf(ModelType::kGemma_2B)));
  ModelConfig recurrent = ConfigOf(ModelType::kRecurrentGemma_2B);
  recurrent.rope_base_full = 1e6;
  recurrent.rope_factor_full = 8;
  EXPECT_TRUE(recurrent.SameShape(ConfigOf(ModelType::kRecurrentGemma_2B)));
  recurrent.rope_base_sliding = 1e6;
  EXPECT_FALSE(recurrent.SameShape(ConfigOf(ModelType::kRecurrentGemma_2B)));
}

TEST(ConfigTest, AFileOfGemma3WithoutAWindowHasFullLayersOnly) {
  ModelConfig table = ConfigOf(ModelType::kGemma3_270M);
  table.sliding_window = 0;
  const ModelConfig loaded = Load(BuilderFor(table));
  EXPECT_EQ(loaded.sliding_window, 0u);
  EXPECT_EQ(loaded.layer_kinds,
            std::vector<LayerKind>(table.num_layers, LayerKind::kFull));
  EXPECT_TRUE(loaded.name.empty());
  ModelConfig gemma2 = ConfigOf(ModelType::kGemma2_2B);
  gemma2.sliding_window = 0;
  EXPECT_THROW(Load(BuilderFor(gemma2)), CorruptFile);
}

TEST(ConfigTest, ShapesThatShareAnotherTypesShapeHaveTheirOwnName) {
  EXPECT_EQ(ModelTypeFromName("codegemma-2b"), ModelType::kGemma_2B);
  EXPECT_EQ(ModelTypeFromName("codegemma-7b"), ModelType::kGemma_7B);
}

TEST(ConfigTest, RecurrentCachesHoldTheStateOfTheirLayers) {
  const ModelConfig& config = ConfigOf(ModelType::kRecurrentGemma_2B);
  EXPECT_EQ(config.rope_dim, 128u);
  EXPECT_EQ(config.embedding_scale, 50.5f) << "sqrt(2560), rounded to bf16";
  const auto layout = config.MakeKvLayout(KvDtype::kBF16, 64);
  EXPECT_EQ(layout->groups()[1].layers.size(), 8u);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 0u);
  EXPECT_EQ(layout->state_floats(0), 4u * 2560);
  EXPECT_EQ(layout->layers()[25].kind, LayerKind::kRecurrent);
  EXPECT_EQ(layout->layers()[23].kind, LayerKind::kSliding);
}

TEST(ConfigTest, BadFilesAreRefusedWithTheKey) {
  const ModelConfig& good = ConfigOf(ModelType::kGemma3_270M);
  const auto message = [](GgufBuilder builder) -> std::string {
    try {
      Load(builder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  GgufBuilder other;
  other.Set("general.architecture", "llama");
  EXPECT_NE(message(other).find("'llama', expected one of 'gemma', "),
            std::string::npos);
  GgufBuilder recurrent;
  recurrent.Set("general.architecture", "recurrentgemma");
  EXPECT_NE(message(recurrent).find("Hugging Face directory"),
            std::string::npos);
  GgufBuilder yarn = BuilderFor(good);
  yarn.Set("gemma3.rope.scaling.type", "yarn");
  EXPECT_NE(message(yarn).find("'yarn', expected 'linear'"), std::string::npos);
  EXPECT_NE(message(GgufBuilder()).find("general.architecture is missing"),
            std::string::npos);
  GgufBuilder missing;
  missing.Set("general.architecture", "gemma3");
  EXPECT_NE(message(missing).find("gemma3.embedding_length is missing"),
            std::string::npos);
  ModelConfig bad = good;
  bad.num_heads = 3;
  bad.kv_heads = 2;
  EXPECT_NE(message(BuilderFor(bad)).find("multiple of kv_heads"),
            std::string::npos);
  bad = good;
  bad.hidden_size = size_t{1} << 30;
  EXPECT_NE(message(BuilderFor(bad)).find("embedding_length"),
            std::string::npos);
  bad = good;
  bad.num_layers = 5000;
  EXPECT_NE(message(BuilderFor(bad)).find("block_count"), std::string::npos);
  GgufBuilder eos = BuilderFor(good);
  eos.Set("tokenizer.ggml.eos_token_id", uint32_t{300000});
  EXPECT_NE(message(eos).find("eos_token_id"), std::string::npos);
}

TEST(ConfigTest, ValidateNamesTheField) {
  const auto refused = [](const char* field,
                          const std::function<void(ModelConfig&)>& change) {
    ModelConfig config = ConfigOf(ModelType::kGemma3_270M);
    change(config);
    try {
      config.Validate();
      FAIL() << field << " was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(field), std::string::npos)
          << error.what();
    }
  };
  refused("architecture", [](auto& c) { c.architecture = "llama"; });
  refused("hidden_size", [](auto& c) { c.hidden_size = 0; });
  refused("num_layers", [](auto& c) { c.num_layers = 0; });
  refused("num_heads", [](auto& c) { c.num_heads = 0; });
  refused("kv_heads", [](auto& c) { c.kv_heads = 0; });
  refused("kv_heads", [](auto& c) { c.kv_heads = 3; });
  refused("head_dim", [](auto& c) { c.head_dim = 100; });
  refused("head_dim", [](auto& c) { c.head_dim = 1024; });
  refused("layer_kinds", [](auto& c) { c.layer_kinds.pop_back(); });
  refused("sliding_window", [](auto& c) { c.sliding_window = 0; });
  refused("rms_epsilon", [](auto& c) { c.rms_epsilon = -1; });
  refused("query_scale", [](auto& c) {
    c.query_scale = std::numeric_limits<double>::quiet_NaN();
  });
  refused("rope_base_full", [](auto& c) { c.rope_base_full = 1; });
  refused("rope_factor_full", [](auto& c) { c.rope_factor_full = 0.5; });
  refused("rope_dim", [](auto& c) { c.rope_dim = 257; });
  refused("rope_dim", [](auto& c) { c.rope_dim = 31; });
  refused("embedding_scale", [](auto& c) {
    c.embedding_scale = std::numeric_limits<float>::infinity();
  });
  refused("lru_width", [](auto& c) { c.lru_width = 64; });
  refused("lru_width",
          [](auto& c) { c.layer_kinds[0] = LayerKind::kRecurrent; });
  refused("lru_width", [](auto& c) {
    c.layer_kinds[0] = LayerKind::kRecurrent;
    c.lru_width = 640, c.lru_blocks = 3, c.conv_width = 4;
  });
  refused("eos id", [](auto& c) { c.eos_ids = {-1}; });
}

TEST(CreateKVCacheTest, DefaultsToTheContextAndChecksTheCapacity) {
  const auto cache = CreateKVCache(ModelType::kGemma3_270M);
  EXPECT_EQ(cache->capacity_tokens(), 32768u);
  EXPECT_EQ(cache->model_type(), "gemma3-270m");
  EXPECT_EQ(cache->length(), 0u);
  EXPECT_EQ(cache->nbytes(), 0u) << "nothing is allocated before a token";
  EXPECT_EQ(CreateKVCache(ModelType::kGemma3_4B, {.capacity_tokens = 10})
                ->capacity_tokens(),
            10u);
  EXPECT_THROW(
      CreateKVCache(ModelType::kGemma3_270M, {.capacity_tokens = 32769}),
      InvalidArgument);
  EXPECT_THROW(CreateKVCache(ModelType::kGemma3_270M, {.block_tokens = 48}),
               InvalidArgument);
}

}  // namespace
}  // namespace gkv
