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
  const auto u32 = [](size_t value) { return static_cast<uint32_t>(value); };
  builder.Set("general.architecture", "gemma3")
      .Set("gemma3.embedding_length", u32(config.hidden_size))
      .Set("gemma3.block_count", u32(config.num_layers))
      .Set("gemma3.attention.head_count", u32(config.num_heads))
      .Set("gemma3.attention.head_count_kv", u32(config.kv_heads))
      .Set("gemma3.attention.key_length", u32(config.head_dim))
      .Set("gemma3.attention.value_length", u32(config.head_dim))
      .Set("gemma3.feed_forward_length", u32(config.ffn_dim))
      .Set("gemma3.context_length", u32(config.context_length))
      .Set("gemma3.attention.sliding_window", u32(config.sliding_window))
      .Set("gemma3.attention.layer_norm_rms_epsilon", 1e-6f)
      .Set("gemma3.rope.freq_base", 1e6f);
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
  EXPECT_EQ(layout->num_sliding(), 15u);
  EXPECT_EQ(layout->bytes_per_token(GroupId::kFull), 3u * 1024);
  EXPECT_EQ(layout->bytes_per_token(GroupId::kSliding), 15u * 1024);
}

TEST(ConfigTest, FilesOfNamedShapesCarryTheName) {
  for (const ModelConfig& config : NamedConfigs()) {
    GgufBuilder builder = BuilderFor(config);
    if (config.rope_factor_full != 1) {
      builder.Set("gemma3.rope.scaling.factor",
                  static_cast<float>(config.rope_factor_full));
    }
    const ModelConfig loaded = Load(builder);
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
  EXPECT_NE(message(other).find("'llama', expected 'gemma3'"),
            std::string::npos);
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
