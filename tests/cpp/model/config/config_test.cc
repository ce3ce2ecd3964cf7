#include "gemmakv/config.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "base/says.h"
#include "io/gguf_builder.h"
#include "model/config/config_gguf.h"
#include "model/config/family.h"
#include "model/config/fields.h"
#include "model/create_conversation.h"

namespace gkv {
namespace {

// Of layers that read it and do not differ in it.
double Get(const ModelConfig& config, std::string_view field) {
  return FieldNamed(field).Get(config)[0];
}
void Set(ModelConfig& config, std::string_view field, double value) {
  FieldNamed(field).Set(config, std::array{value});
}
std::vector<LayerKind> KindsOf(const ModelConfig& config) {
  std::vector<LayerKind> kinds;
  for (const LayerConfig& layer : config.layers) kinds.push_back(layer.kind);
  return kinds;
}

// Of a family whose full layers have sizes of their own.
void SetByKind(const ModelConfig& config, std::string_view omit,
               GgufBuilder& builder) {
  const std::string prefix = config.architecture + ".";
  const LayerConfig &sliding = config.layers.front(),
                    &full = config.layers.back();
  const auto size = [&](const std::string& key, size_t value) {
    if (key == omit) return;
    builder.Set(prefix + key, static_cast<uint32_t>(value));
  };
  std::vector<uint32_t> kv_heads, ffn;
  std::vector<bool> slides;
  size_t shared = 0, full_layer = 0;
  for (size_t i = 0; i < config.num_layers(); ++i) {
    const LayerConfig& layer = config.layers[i];
    kv_heads.push_back(static_cast<uint32_t>(layer.kv_heads));
    ffn.push_back(static_cast<uint32_t>(layer.ffn_dim));
    slides.push_back(layer.kind == LayerKind::kSliding);
    shared += layer.shares_kv.has_value();
    if (full_layer == 0 && !slides.back()) full_layer = i;
  }
  const std::vector<uint8_t> value(4);
  if (!config.keys_are_values) {
    builder.AddRaw("blk." + std::to_string(full_layer) + ".attn_v.weight", 0,
                   {1, 1}, value);
  }
  if (shared != 0) {
    size("attention.shared_kv_layers", shared);
    builder.Set(prefix + "feed_forward_length", ffn);
  }
  if (config.ple_dim != 0) {
    size("embedding_length_per_layer_input", config.ple_dim);
    builder.AddRaw("per_layer_token_embd.weight", 99, {32, config.ple_vocab},
                   value);
  }
  if (config.num_experts != 0) {
    size("expert_count", config.num_experts);
    size("expert_used_count", config.experts_used);
    size("expert_feed_forward_length", config.expert_ffn_dim);
  }
  builder.Set(prefix + "attention.head_count_kv", kv_heads);
  if (omit != "attention.sliding_window_pattern") {
    builder.Set(prefix + "attention.sliding_window_pattern", slides);
  }
  for (const char* key : {"attention.key_length", "attention.value_length",
                          "rope.dimension_count"}) {
    size(key, full.head_dim);
    size(std::string(key) + "_swa", sliding.head_dim);
  }
  std::vector<float> divisors(full.rope_dim / 2, 1.0f);
  std::fill(divisors.end() - static_cast<long>(full.still_pairs),
            divisors.end(), 1e30f);
  builder.AddF32("rope_freqs.weight", 1, divisors.size(), divisors);
}

// Of a family with several residual streams.
void SetStreams(const ModelConfig& config, std::string_view omit,
                GgufBuilder& builder) {
  const std::string prefix = config.architecture + ".";
  std::vector<uint32_t> ffn;
  std::vector<bool> slides;
  std::vector<float> cutoffs;
  uint32_t shared = 0;
  for (const LayerConfig& layer : config.layers) {
    ffn.push_back(static_cast<uint32_t>(layer.ffn_dim));
    slides.push_back(layer.kind == LayerKind::kSliding);
    cutoffs.push_back(static_cast<float>(layer.sparsity_cutoff));
    shared += layer.shares_kv.has_value();
  }
  const auto set = [&](const std::string& key, const auto& value) {
    if (key != omit) builder.Set(prefix + key, value);
  };
  set("altup.num_inputs", static_cast<uint32_t>(config.altup_inputs));
  set("altup.active_idx", static_cast<uint32_t>(config.altup_active));
  set("embedding_length_per_layer_input",
      static_cast<uint32_t>(config.ple_dim));
  set("attention.shared_kv_layers", shared);
  set("attention.sliding_window_pattern", slides);
  set("feed_forward_length", ffn);
  set("activation_sparsity_scale", cutoffs);
  const std::vector<uint8_t> value(4);
  builder
      .AddRaw("per_layer_token_embd.weight", 99, {32, config.ple_vocab}, value)
      .AddRaw("blk.0.laurel_l.weight", 99, {32, config.laurel_rank}, value);
}

// Metadata of a file with the shape of `config`, whose layers do not differ but
// in kind.
GgufBuilder BuilderFor(const ModelConfig& config, std::string_view omit = "") {
  GgufBuilder builder;
  const std::string prefix = config.architecture + ".";
  const auto size = [&](const char* key, std::string_view field) {
    if (key == omit) return;
    builder.Set(prefix + key, static_cast<uint32_t>(Get(config, field)));
  };
  builder.Set("general.architecture", config.architecture)
      .Set(prefix + "attention.layer_norm_rms_epsilon", 1e-6f);
  if (omit != "rope.freq_base") {
    builder.Set(prefix + "rope.freq_base",
                static_cast<float>(Get(config, "rope_base_full")));
  }
  size("embedding_length", "hidden_size");
  size("block_count", "num_layers");
  size("attention.head_count", "num_heads");
  if (config.layers.front().head_dim != config.layers.back().head_dim) {
    SetByKind(config, omit, builder);
  } else {
    size("attention.head_count_kv", "kv_heads");
    size("attention.key_length", "head_dim");
    size("attention.value_length", "head_dim");
  }
  if (config.altup_inputs != 0) SetStreams(config, omit, builder);
  if (!config.layers.back().shares_kv) size("feed_forward_length", "ffn_dim");
  size("context_length", "context_length");
  if (config.bidirectional) size("dense_2_feat_out", "dense_dim");
  if (omit == "sliding_window") return builder;
  if (config.bidirectional) {
    const auto window = static_cast<uint32_t>(Get(config, "sliding_window"));
    builder.Set(prefix + "attention.sliding_window", 2 * (window - 1));
  } else {
    size("attention.sliding_window", "sliding_window");
  }
  return builder;
}

ModelConfig Load(GgufBuilder builder, size_t vocab_size = 262144) {
  const std::vector<uint8_t> data(32);
  builder.AddRaw("token_embd.weight", 99, {640, vocab_size}, data);
  const std::vector<uint8_t> bytes = builder.Build();
  GgufFile file(bytes, "test.gguf");
  return ConfigFromGguf(file);
}

std::vector<std::string> DifferingFields(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const FieldDifference& one : CompareWithNamed(config)) {
    names.push_back(one.field);
  }
  return names;
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
  EXPECT_EQ(config.num_layers(), 18u);
  EXPECT_EQ(config.layers[4].kind, LayerKind::kSliding);
  EXPECT_EQ(config.layers[5].kind, LayerKind::kFull);
  EXPECT_EQ(config.layers[17].kind, LayerKind::kFull);
  EXPECT_EQ(config.query_scale, 1.0 / 16);
  const auto layout = config.MakeKvLayout(KvDtype::kBF16, 64);
  EXPECT_EQ(layout->groups()[0].layers.size(), 15u);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 3u * 1024);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding), 15u * 1024);
}

TEST(ConfigTest, FilesOfNamedShapesCarryTheName) {
  for (const ModelConfig& config : NamedConfigs()) {
    // Those that have no names in this format.
    if (config.lru_width != 0 || config.embedding_dim != 0) continue;
    GgufBuilder builder = BuilderFor(config);
    if (Get(config, "rope_factor_full") != 1) {
      builder.Set("gemma3.rope.scaling.factor",
                  static_cast<float>(Get(config, "rope_factor_full")));
    }
    const ModelConfig loaded = Load(builder, config.vocab_size);
    EXPECT_EQ(loaded.name, config.name);
    EXPECT_EQ(loaded.eos_ids, config.eos_ids);
    EXPECT_EQ(loaded.Hash(), config.Hash());
  }
}

TEST(ConfigTest, TheFileWinsOverTheTable) {
  ModelConfig config = ConfigOf(ModelType::kGemma3_270M);
  Set(config, "sliding_window", 256);
  const ModelConfig loaded = Load(BuilderFor(config));
  EXPECT_EQ(Get(loaded, "sliding_window"), 256);
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

// As Ollama's files of Gemma 3.
TEST(ConfigTest, FilesOfNamedShapesMayOmitTheFactorOfPositions) {
  for (const ModelConfig& table : NamedConfigs()) {
    if (table.architecture != "gemma3") continue;
    const double factor = Get(table, "rope_factor_full");
    const ModelConfig omits = Load(BuilderFor(table), table.vocab_size);
    EXPECT_EQ(Get(omits, "rope_factor_full"), factor);
    EXPECT_EQ(omits.name, table.name);
    EXPECT_TRUE(CompareWithNamed(omits).empty());
    // What is stated counts, and is told.
    const float other = factor == 8 ? 1.0f : 8.0f;
    for (const char* key : {"scaling.factor", "scale_linear"}) {
      const ModelConfig states =
          Load(BuilderFor(table).Set(std::string("gemma3.rope.") + key, other),
               table.vocab_size);
      EXPECT_EQ(Get(states, "rope_factor_full"), other);
      const std::vector<FieldDifference> found = CompareWithNamed(states);
      ASSERT_EQ(found.size(), 1u);
      EXPECT_EQ(found[0].field, "rope_factor_full");
      EXPECT_EQ(found[0].layer, std::nullopt);
      EXPECT_EQ(found[0].found, factor == 8 ? "1" : "8");
      EXPECT_EQ(found[0].expected, factor == 8 ? "8" : "1");
    }
  }
  const ModelConfig& table = ConfigOf(ModelType::kGemma3_4B);
  const ModelConfig none =
      Load(BuilderFor(table).Set("gemma3.rope.scaling.type", "none"));
  EXPECT_EQ(Get(none, "rope_factor_full"), 1);
  EXPECT_EQ(DifferingFields(none),
            std::vector<std::string>{"rope_factor_full"});
}

TEST(ConfigTest, CompareWithNamedTypes) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma3_4B);
  EXPECT_TRUE(CompareWithNamed(table).empty());
  ModelConfig other = table;
  other.vocab_size += 64;
  EXPECT_TRUE(CompareWithNamed(other).empty()) << "another padding";
  other.context_length = 8192;
  other.final_soft_cap = 30;
  other.qk_norm = false;
  other.layers[7].ffn_dim = 1024;
  const std::vector<FieldDifference> found = CompareWithNamed(other);
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].field, "ffn_dim");
  EXPECT_EQ(found[0].layer, 7u);
  EXPECT_EQ(found[0].found, "1024");
  EXPECT_EQ(found[0].expected, "10240");
  EXPECT_EQ(found[1].field, "context_length");
  EXPECT_EQ(found[2].field, "final_soft_cap");
  EXPECT_EQ(found[2].expected, "0");
  EXPECT_EQ(found[3].field, "qk_norm");
  other = table;
  other.hidden_size = 2576;
  other.context_length = 8192;
  EXPECT_EQ(FindNamedLike(other), nullptr);
  EXPECT_TRUE(CompareWithNamed(other).empty());
}

TEST(ConfigTest, OtherKeysOfTheRotation) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma3_1B);
  const ModelConfig loaded =
      Load(BuilderFor(table, "rope.freq_base")
               .Set("gemma3.rope.global.freq_base", 5e5f)
               .Set("gemma3.rope.local.freq_base", 2e4f));
  EXPECT_EQ(Get(loaded, "rope_base_full"), 5e5);
  EXPECT_EQ(Get(loaded, "rope_base_sliding"), 2e4);
  const ModelConfig both =
      Load(BuilderFor(table).Set("gemma3.rope.global.freq_base", 1e6f));
  EXPECT_EQ(Get(both, "rope_base_full"), 1e6);
  EXPECT_THROW(
      Load(BuilderFor(table).Set("gemma3.rope.global.freq_base", 5e5f)),
      Mismatch);
  const ModelConfig& e2b = ConfigOf(ModelType::kGemma3n_E2B);
  EXPECT_EQ(Get(Load(BuilderFor(e2b).Set("gemma3n.rope.freq_base_local", 2e4f)),
                "rope_base_sliding"),
            2e4);
}

// A file of no named type; what it omits is as the family has it.
TEST(ConfigTest, FilesOfOtherShapesHaveTheFamilysDefaults) {
  ModelConfig slice = ConfigOf(ModelType::kGemma3n_E4B);
  slice.layers.resize(33);
  const ModelConfig loaded =
      Load(BuilderFor(slice, "attention.shared_kv_layers"));
  EXPECT_EQ(FindNamedLike(loaded), nullptr);
  EXPECT_EQ(loaded.layers[19].shares_kv, std::nullopt);
  EXPECT_EQ(loaded.layers[20].shares_kv, 18u);
  EXPECT_EQ(Load(BuilderFor(slice, "embedding_length_per_layer_input")).ple_dim,
            256u);

  const auto message = [](GgufBuilder builder) -> std::string {
    try {
      Load(builder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  ModelConfig e2b = ConfigOf(ModelType::kGemma4_E2B);
  e2b.hidden_size = 1552;
  EXPECT_NE(message(BuilderFor(e2b, "attention.sliding_window_pattern"))
                .find("gemma4.attention.sliding_window_pattern is missing"),
            std::string::npos);
  EXPECT_NE(message(BuilderFor(e2b, "sliding_window"))
                .find("gemma4.attention.sliding_window is missing"),
            std::string::npos);
  ModelConfig vectors = ConfigOf(ModelType::kEmbeddingGemma_300M);
  EXPECT_EQ(Load(BuilderFor(vectors, "sliding_window")).name,
            "embeddinggemma-300m");
  vectors.hidden_size = 784;
  EXPECT_NE(message(BuilderFor(vectors, "sliding_window"))
                .find("gemma-embedding.attention.sliding_window is missing"),
            std::string::npos);
}

TEST(ConfigTest, ScalesDoNotDependOnTheCallersRounding) {
  for (size_t hidden = 64; hidden < 6000; hidden += 16) {
    const float expected = DefaultEmbeddingScale(hidden);
    const OddFpEnvironment odd;
    ASSERT_EQ(DefaultEmbeddingScale(hidden), expected) << hidden;
  }
  // Of no named size: 1 / sqrt(head_dim).
  ModelConfig config = ConfigOf(ModelType::kGemma3_1B);
  config.layers.resize(3);
  for (const size_t head_dim : {32u, 96u, 160u, 192u, 224u}) {
    for (LayerConfig& layer : config.layers) {
      layer.head_dim = layer.rope_dim = head_dim;
    }
    const ModelConfig expected = Load(BuilderFor(config));
    const OddFpEnvironment odd;
    const ModelConfig found = Load(BuilderFor(config));
    EXPECT_EQ(found.query_scale, expected.query_scale) << head_dim;
    EXPECT_EQ(found.Hash(), expected.Hash()) << head_dim;
  }
}

TEST(ConfigTest, TokensThatEndAReply) {
  const auto builder = [] {
    return BuilderFor(ConfigOf(ModelType::kGemma_2B))
        .Set("tokenizer.ggml.tokens",
             std::vector<std::string>{"<pad>", "<eos>", "<bos>", "<unk>",
                                      "<end_of_turn>"});
  };
  EXPECT_EQ(Load(builder()).eos_ids, (std::vector<int32_t>{1, 4}));
  EXPECT_EQ(
      Load(builder().Set("tokenizer.ggml.eot_token_id", uint32_t{107})).eos_ids,
      (std::vector<int32_t>{1, 107}));
  const auto with = [&](std::vector<int32_t> ids) {
    return Load(BuilderFor(ConfigOf(ModelType::kGemma3_1B))
                    .Set("tokenizer.ggml.eos_token_ids", ids))
        .eos_ids;
  };
  EXPECT_EQ(with({1, 106, 50}), (std::vector<int32_t>{1, 50, 106}));
  EXPECT_THROW(with({262144}), CorruptFile);
  EXPECT_THROW(with({-1}), CorruptFile);
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
  EXPECT_EQ(Get(loaded, "sliding_window"), 4096);
  EXPECT_EQ(loaded.attn_soft_cap, 50);
  EXPECT_EQ(loaded.final_soft_cap, 30);
  EXPECT_EQ(loaded.layers[0].kind, LayerKind::kSliding);
  EXPECT_EQ(loaded.layers[1].kind, LayerKind::kFull);
  EXPECT_EQ(loaded.eos_ids, (std::vector<int32_t>{1, 107}));
}

TEST(ConfigTest, WhatNoLayerReadsIsNoPartOfTheIdentity) {
  ModelConfig full = ConfigOf(ModelType::kGemma_2B);
  for (LayerConfig& layer : full.layers) layer.window = 512;
  EXPECT_TRUE(full.SameShape(ConfigOf(ModelType::kGemma_2B)));
  ModelConfig recurrent = ConfigOf(ModelType::kRecurrentGemma_2B);
  for (LayerConfig& layer : recurrent.layers) {
    if (layer.kind == LayerKind::kSliding) continue;
    layer.rope_base = 1e6;
    layer.rope_factor = 8;
  }
  EXPECT_TRUE(recurrent.SameShape(ConfigOf(ModelType::kRecurrentGemma_2B)));
  Set(recurrent, "rope_base_sliding", 1e6);
  EXPECT_FALSE(recurrent.SameShape(ConfigOf(ModelType::kRecurrentGemma_2B)));
}

// Fingerprints of files that were written hold these values.
TEST(ConfigTest, HashesOfNamedTypesStay) {
  const std::map<std::string, std::string> expected = {
      {"gemma-2b", "c56b5ba614a697ba63255702f516a3e1"},
      {"gemma-7b", "1328aaa01d5b56b8bd849b78bd239322"},
      {"gemma2-2b", "86ae56a91f4e16c57c38872c2cc16a5e"},
      {"gemma2-9b", "932e58555aac7748e3f13c48bb9f19d5"},
      {"gemma2-27b", "fe88793c89b077c21675eb1f8b325858"},
      {"gemma3-270m", "5fe419e105abb40c4db2245daea0c4f7"},
      {"gemma3-1b", "a5f28f215c78df40fa8ade45cb1524fe"},
      {"gemma3-4b", "c8aa730c66ecb94c46282045b55b6e42"},
      {"gemma3-12b", "09cb04904fd59be92a64e869f85aeeec"},
      {"gemma3-27b", "1ea6aaca3dbc1b554f7b2a6aa0374282"},
      {"gemma3n-e2b", "6bc92e921b96abcc5b86f983e5c7b852"},
      {"gemma3n-e4b", "5dcbfb1bca945b2b1aeb87f32a9f293b"},
      {"gemma4-e2b", "fe40f17810a0f0865056b56bb6e3ebba"},
      {"gemma4-e4b", "23b82b212bc0f127f261588d5ba273e4"},
      {"gemma4-12b", "1cd567b9dc54bc8655d546b07eeecf86"},
      {"gemma4-26b-a4b", "8319b49d08a286a22065608e786f018f"},
      {"gemma4-31b", "6729347314ab34bfa1b81ae0e4457e2c"},
      {"embeddinggemma-300m", "930ec3850ab9ca6c7b5f6df17f278df3"},
      {"embeddinggemma-2", "d57878a6fdbd3da9f27cadfc93aa244b"},
      {"recurrentgemma-2b", "d2661264d72c02379824e656aece737d"},
      {"recurrentgemma-9b", "91cb6f074886008f2b665b02c9ff7a40"},
  };
  for (const ModelConfig& config : NamedConfigs()) {
    ASSERT_TRUE(expected.contains(config.name))
        << config.name << " " << config.Hash().Hex();
    EXPECT_EQ(config.Hash().Hex(), expected.at(config.name)) << config.name;
  }
}

// A field that is added to the list and changes nothing of the identity would
// let caches of other models pass.
TEST(ConfigTest, EveryFieldIsPartOfTheIdentity) {
  ModelConfig base = ConfigOf(ModelType::kRecurrentGemma_2B);
  base.layers[0].kind = LayerKind::kFull;
  base.layers[0].rope_base = 1e4;
  for (const Field& field : Fields()) {
    ModelConfig changed = base;
    std::vector<double> values = field.Get(changed);
    values[0] = field.at.type == Field::Type::kFlag ? 1 - values[0]
                : std::isfinite(values[0])          ? values[0] + 2
                                                    : 2;
    field.Set(changed, values);
    EXPECT_EQ(changed.Hash() == base.Hash(), field.mark == Field::kNever)
        << field.name;
  }
}

TEST(ConfigTest, LayersMayDiffer) {
  const ModelConfig& base = ConfigOf(ModelType::kGemma3_270M);
  for (const char* name : {"num_heads", "kv_heads", "head_dim", "ffn_dim",
                           "sliding_window", "rope_dim", "rope_base_sliding",
                           "rope_factor_sliding", "still_pairs"}) {
    SCOPED_TRACE(name);
    const Field& field = FieldNamed(name);
    ModelConfig config = base;
    std::vector<double> values(config.num_layers(), field.Get(config)[0]);
    values[3] = 2 * values[3] + (values[3] == 0 ? 8 : 0);
    field.Check(config, values, name);
    field.Set(config, values);
    EXPECT_EQ(field.Get(config)[3], values[3]);
    EXPECT_EQ(field.Get(config).size(), config.num_layers());
    EXPECT_NE(config.Hash(), base.Hash());
    ModelConfig other = base;
    std::swap(values[3], values[4]);
    field.Set(other, values);
    EXPECT_NE(other.Hash(), config.Hash());
  }
  const Field& heads = FieldNamed("num_heads");
  ModelConfig config = base;
  const auto refused = [&](const std::vector<double>& values) -> std::string {
    try {
      heads.Check(config, values, "heads");
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refused({4, 4}),
            "heads has 2 entries, expected one number or one for each of 18 "
            "layers");
  EXPECT_EQ(refused({2.5}), "heads is 2.5, expected 1..4096");
  std::vector<double> values(18, 4);
  values[7] = 5000;
  EXPECT_EQ(refused(values), "heads of layer 7 is 5000, expected 1..4096");
}

TEST(ConfigTest, TheFirstValueIsOfALayerThatReadsTheField) {
  const ModelConfig& gemma4 = ConfigOf(ModelType::kGemma4_31B);
  EXPECT_EQ(FieldNamed("head_dim").First(gemma4), 256);
  EXPECT_EQ(FieldNamed("rope_base_full").First(gemma4), 1e6);
  EXPECT_EQ(FieldNamed("query_scale").First(gemma4), 1);
  EXPECT_EQ(FieldNamed("rope_base_full")
                .First(ConfigOf(ModelType::kRecurrentGemma_2B)),
            std::nullopt);
}

// Arrays with a number for each layer, as files of later families have.
TEST(ConfigTest, FilesMayStateANumberForEachLayer) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma3_270M);
  std::vector<uint32_t> widths(18, 2048);
  const auto load = [&] {
    return Load(BuilderFor(table, "feed_forward_length")
                    .Set("gemma3.feed_forward_length", widths));
  };
  EXPECT_EQ(load().name, "gemma3-270m");
  widths[5] = 4096;
  EXPECT_EQ(load().layers[5].ffn_dim, 4096u);
  EXPECT_EQ(load().layers[6].ffn_dim, 2048u);
  EXPECT_TRUE(load().name.empty());
  widths.pop_back();
  EXPECT_THROW(load(), CorruptFile);
}

// Sizes, rotation and window by the kind of layer; values that are keys by what
// tensors there are.
TEST(ConfigTest, FilesOfGemma4StateFullLayersApart) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma4_31B);
  const LayerConfig &sliding = table.layers[4], &full = table.layers[5];
  EXPECT_EQ(sliding.head_dim, 256u);
  EXPECT_EQ(full.head_dim, 512u);
  EXPECT_EQ(sliding.kv_heads, 16u);
  EXPECT_EQ(full.kv_heads, 4u);
  EXPECT_EQ(sliding.still_pairs, 0u);
  EXPECT_EQ(full.still_pairs, 192u);
  EXPECT_EQ(full.rope_dim, 512u);
  EXPECT_TRUE(table.keys_are_values);
  // 80 KiB of a token in full layers, 800 MiB in the windows.
  const auto layout = table.MakeKvLayout(KvDtype::kBF16, 64);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 80u << 10);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding) * 1024, 800u << 20);
  EXPECT_EQ(table.eos_ids, (std::vector<int32_t>{1, 50, 106}));

  const ModelConfig shared =
      Load(BuilderFor(table).Set("gemma4.attention.shared_kv_layers", 8));
  EXPECT_EQ(shared.layers[51].shares_kv, std::nullopt);
  EXPECT_EQ(shared.layers[52].shares_kv, 51u);
  EXPECT_EQ(shared.layers[53].shares_kv, 47u);
  EXPECT_EQ(shared.layers[59].shares_kv, 47u);

  const std::vector<uint8_t> value(4);
  const ModelConfig own =
      Load(BuilderFor(table).AddRaw("blk.5.attn_v.weight", 0, {1, 1}, value));
  EXPECT_FALSE(own.keys_are_values);
  EXPECT_TRUE(own.name.empty());
}

TEST(ConfigTest, SmallGemma4HasPerLayerEmbeddingsAndLayersThatShare) {
  const ModelConfig& e2b = ConfigOf(ModelType::kGemma4_E2B);
  EXPECT_EQ(e2b.layers[4].kind, LayerKind::kFull);
  EXPECT_EQ(e2b.layers[34].kind, LayerKind::kFull);
  EXPECT_EQ(e2b.layers[14].shares_kv, std::nullopt);
  EXPECT_EQ(e2b.layers[15].shares_kv, 13u);
  EXPECT_EQ(e2b.layers[34].shares_kv, 14u);
  EXPECT_EQ(e2b.layers[14].ffn_dim, 6144u);
  EXPECT_EQ(e2b.layers[15].ffn_dim, 12288u);
  EXPECT_EQ(e2b.ple_dim, 256u);
  EXPECT_EQ(e2b.ple_vocab, 262144u);
  const ModelConfig& e4b = ConfigOf(ModelType::kGemma4_E4B);
  EXPECT_EQ(e4b.layers[24].shares_kv, 22u);
  EXPECT_EQ(e4b.layers[41].shares_kv, 23u);
  EXPECT_EQ(e4b.layers[41].ffn_dim, 10240u);
  // Of a token in full layers, and in the windows.
  for (const auto& [config, full, window] :
       {std::tuple(&e2b, 6u, 6u), std::tuple(&e4b, 16u, 20u)}) {
    const auto layout = config->MakeKvLayout(KvDtype::kBF16, 64);
    EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), full << 10);
    EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding) * 512, window << 20);
  }
}

TEST(ConfigTest, Gemma4MayHaveExperts) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma4_26B_A4B);
  EXPECT_EQ(table.num_experts, 128u);
  EXPECT_EQ(table.experts_used, 8u);
  EXPECT_EQ(table.expert_ffn_dim, 704u);
  // 20 KiB of a token in full layers, 200 MiB in the windows.
  const auto layout = table.MakeKvLayout(KvDtype::kBF16, 64);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 20u << 10);
  EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding) * 1024, 200u << 20);
  EXPECT_EQ(Load(BuilderFor(table)).name, "gemma4-26b-a4b");
  // What files of models without experts say of them counts for nothing.
  const ModelConfig none = Load(BuilderFor(table, "expert_count")
                                    .Set("gemma4.expert_count", uint32_t{0}));
  EXPECT_EQ(none.num_experts + none.experts_used + none.expert_ffn_dim, 0u);
  EXPECT_NE(none.Hash(), table.Hash());
}

TEST(ConfigTest, BadExpertsAreRefusedWithTheKey) {
  const auto with = [](ModelType type, const char* key,
                       uint32_t value) -> std::string {
    const ModelConfig& table = ConfigOf(type);
    GgufBuilder builder = BuilderFor(table, key);
    builder.Set(table.architecture + "." + key, value);
    try {
      Load(builder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  constexpr ModelType kExperts = ModelType::kGemma4_26B_A4B;
  EXPECT_EQ(with(kExperts, "expert_used_count", 0),
            "test.gguf: model config: experts_used is 0, expected 1..128, the "
            "num_experts");
  EXPECT_EQ(with(kExperts, "expert_used_count", 129),
            "test.gguf: model config: experts_used is 129, expected 1..128, "
            "the num_experts");
  EXPECT_EQ(with(kExperts, "expert_feed_forward_length", 0),
            "test.gguf: model config: expert_ffn_dim is 0, expected a multiple "
            "of 16");
  EXPECT_EQ(with(kExperts, "expert_feed_forward_length", 700),
            "test.gguf: model config: expert_ffn_dim is 700, expected a "
            "multiple of 16");
  EXPECT_EQ(with(kExperts, "expert_count", 5000),
            "test.gguf: metadata gemma4.expert_count is 5000, expected "
            "0..4096");
  EXPECT_EQ(with(ModelType::kGemma3_1B, "expert_count", 8),
            "test.gguf: metadata gemma3.expert_count is 8, expected 0: such "
            "models are not supported");
}

TEST(ConfigTest, Gemma3nHasStreamsAndLayersThatShare) {
  const ModelConfig& e2b = ConfigOf(ModelType::kGemma3n_E2B);
  const ModelConfig& e4b = ConfigOf(ModelType::kGemma3n_E4B);
  for (const ModelConfig* config : {&e2b, &e4b}) {
    EXPECT_EQ(config->altup_inputs, 4u);
    EXPECT_TRUE(config->altup_correct_scale);
    EXPECT_EQ(config->laurel_rank, 64u);
    EXPECT_EQ(config->ple_vocab, 262144u);
    EXPECT_EQ(config->vocab_size, 262400u);
    EXPECT_EQ(config->layers[9].sparsity_cutoff, 1.6448535919189453);
    EXPECT_FALSE(std::isfinite(config->layers[10].sparsity_cutoff));
    EXPECT_EQ(config->layers[19].shares_kv, std::nullopt);
    EXPECT_EQ(config->layers[20].shares_kv, 18u);
    EXPECT_EQ(config->layers[24].shares_kv, 19u);
    const auto layout = config->MakeKvLayout(KvDtype::kBF16, 64);
    EXPECT_EQ(layout->bytes_per_token(LayerKind::kFull), 8u << 10);
    EXPECT_EQ(layout->bytes_per_token(LayerKind::kSliding) * 512, 16u << 20);
  }
  EXPECT_EQ(e2b.num_layers(), 30u);
  EXPECT_EQ(e4b.layers[34].shares_kv, 19u);

  // Converters differ in the last digits of the number that they state.
  std::vector<float> stated(30, -std::numeric_limits<float>::infinity());
  std::fill_n(stated.begin(), 10, 1.6448533535f);
  constexpr const char* kKey = "activation_sparsity_scale";
  const auto load = [&] {
    return Load(BuilderFor(e2b, kKey).Set(std::string("gemma3n.") + kKey,
                                          stated));
  };
  EXPECT_EQ(load().name, "gemma3n-e2b");
  EXPECT_EQ(Load(BuilderFor(e2b, kKey)).name, "gemma3n-e2b") << "by family";
  stated[3] = 1.64f;
  EXPECT_TRUE(load().name.empty());
  stated[3] = 0;
  EXPECT_EQ(load().layers[3].sparsity_cutoff, 0);

  // A slice of the larger one, with widths by layer.
  ModelConfig slice = e4b;
  slice.layers[7].ffn_dim = 12288;
  const ModelConfig loaded = Load(BuilderFor(slice));
  EXPECT_EQ(loaded.layers[7].ffn_dim, 12288u);
  EXPECT_EQ(loaded.layers[8].ffn_dim, 16384u);
  EXPECT_TRUE(loaded.name.empty());
}

TEST(ConfigTest, BadFilesOfGemma3nAreRefusedWithTheKey) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma3n_E2B);
  const auto with = [&](const std::string& key,
                        const auto& value) -> std::string {
    try {
      Load(BuilderFor(table, key).Set("gemma3n." + key, value));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(with("altup.num_inputs", uint32_t{1}),
            "test.gguf: model config: altup_inputs is 1, expected 0 or 2..8");
  EXPECT_EQ(with("altup.num_inputs", uint32_t{9}),
            "test.gguf: metadata gemma3n.altup.num_inputs is 9, expected 0..8");
  EXPECT_EQ(with("altup.active_idx", uint32_t{4}),
            "test.gguf: model config: altup_active is 4, expected less than "
            "altup_inputs 4");
  EXPECT_EQ(with("activation_sparsity_scale", std::vector<float>(29, 1.0f)),
            "test.gguf: metadata gemma3n.activation_sparsity_scale has 29 "
            "entries, expected one number or one for each of 30 layers");
  std::vector<float> cutoffs(30, 1.0f);
  cutoffs[4] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(with("activation_sparsity_scale", cutoffs),
            "test.gguf: metadata gemma3n.activation_sparsity_scale of layer 4 "
            "is inf, expected a finite number");
  cutoffs[4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(with("activation_sparsity_scale", cutoffs).find("of layer 4 is "),
            std::string::npos);
  EXPECT_EQ(with("feed_forward_length", std::vector<uint32_t>(31, 8192)),
            "test.gguf: metadata gemma3n.feed_forward_length has 31 entries, "
            "expected one number or one for each of 30 layers");
  EXPECT_EQ(with("attention.shared_kv_layers", uint32_t{27}),
            "test.gguf: metadata gemma3n.attention.shared_kv_layers is 27, "
            "expected layers of each kind before those");
}

TEST(ConfigTest, BadFilesOfGemma4AreRefusedWithTheKey) {
  const ModelConfig& table = ConfigOf(ModelType::kGemma4_12B);
  const auto message = [](GgufBuilder builder) -> std::string {
    try {
      Load(builder);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto with = [&](const char* key, uint32_t value) {
    return message(
        BuilderFor(table, key).Set(std::string("gemma4.") + key, value));
  };
  EXPECT_EQ(with("attention.shared_kv_layers", 43),
            "test.gguf: metadata gemma4.attention.shared_kv_layers is 43, "
            "expected layers of each kind before those");
  EXPECT_EQ(with("embedding_length_per_layer_input", 256),
            "test.gguf: tensor per_layer_token_embd.weight is missing or not a "
            "matrix");
  EXPECT_NE(with("embedding_length_per_layer_input", 1 << 20)
                .find("embedding_length_per_layer_input is 1048576, expected "
                      "0..4096"),
            std::string::npos);
  ModelConfig cut = ConfigOf(ModelType::kGemma4_E2B);
  cut.ple_vocab = 262143;
  EXPECT_EQ(message(BuilderFor(cut)),
            "test.gguf: model config: ple_vocab is 262143, expected at least "
            "vocab_size 262144 with ple_dim 256");
  EXPECT_EQ(with("attention.value_length_swa", 512),
            "test.gguf: value_length_swa is 512, expected key_length 256");
  EXPECT_NE(with("rope.dimension_count_swa", 1024).find("rope.dimension_count"),
            std::string::npos);
  ModelConfig bad = table;
  for (LayerConfig& layer : bad.layers) {
    layer.rope_dim = 300;
    layer.still_pairs = 100;
  }
  EXPECT_EQ(message(BuilderFor(bad)),
            "test.gguf: tensor rope_freqs.weight has 150 values, expected 256 "
            "by rope.dimension_count");
  bad = table;
  bad.layers.back().head_dim = 256;
  EXPECT_EQ(message(BuilderFor(bad)),
            "test.gguf: tensor rope_freqs.weight is missing, expected what "
            "frequencies of full layers are divided by");
}

TEST(ConfigTest, AFileOfGemma3WithoutAWindowHasFullLayersOnly) {
  ModelConfig table = ConfigOf(ModelType::kGemma3_270M);
  Set(table, "sliding_window", 0);
  const ModelConfig loaded = Load(BuilderFor(table));
  EXPECT_EQ(Get(loaded, "sliding_window"), 0);
  EXPECT_EQ(KindsOf(loaded),
            std::vector<LayerKind>(table.num_layers(), LayerKind::kFull));
  EXPECT_TRUE(loaded.name.empty());
  EXPECT_EQ(DifferingFields(loaded),
            (std::vector<std::string>{"layer_kinds", "sliding_window"}));
  EXPECT_EQ(DifferingFields(Load(BuilderFor(table, "sliding_window"))),
            DifferingFields(loaded));
  ModelConfig gemma2 = ConfigOf(ModelType::kGemma2_2B);
  Set(gemma2, "sliding_window", 0);
  EXPECT_THROW(Load(BuilderFor(gemma2)), CorruptFile);
}

TEST(ConfigTest, ShapesThatShareAnotherTypesShapeHaveTheirOwnName) {
  EXPECT_EQ(ModelTypeFromName("codegemma-2b"), ModelType::kGemma_2B);
  EXPECT_EQ(ModelTypeFromName("codegemma-7b"), ModelType::kGemma_7B);
}

TEST(ConfigTest, RecurrentCachesHoldTheStateOfTheirLayers) {
  const ModelConfig& config = ConfigOf(ModelType::kRecurrentGemma_2B);
  EXPECT_EQ(Get(config, "rope_dim"), 128);
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
  Set(bad, "num_heads", 3);
  Set(bad, "kv_heads", 2);
  EXPECT_NE(message(BuilderFor(bad)).find("multiple of kv_heads"),
            std::string::npos);
  bad = good;
  bad.hidden_size = size_t{1} << 30;
  EXPECT_NE(message(BuilderFor(bad)).find("embedding_length"),
            std::string::npos);
  bad = good;
  bad.layers.resize(5000, bad.layers[0]);
  EXPECT_NE(message(BuilderFor(bad)).find("block_count"), std::string::npos);
  GgufBuilder eos = BuilderFor(good);
  eos.Set("tokenizer.ggml.eos_token_id", uint32_t{300000});
  EXPECT_NE(message(eos).find("eos_token_id"), std::string::npos);
}

// Ollama's files of EmbeddingGemma call it a Gemma 3.
TEST(ConfigTest, ErrorsNameTheKeyThatTheFileHas) {
  ModelConfig table = ConfigOf(ModelType::kEmbeddingGemma_300M);
  table.architecture = "gemma3";
  const std::vector<uint8_t> value(4);
  GgufBuilder builder = BuilderFor(table);
  builder.Set("gemma3.pooling_type", uint32_t{1})
      .AddRaw("dense_2.weight", 99, {768, 3072}, value);
  EXPECT_EQ(Load(builder).name, "embeddinggemma-300m");
  try {
    Load(builder.Set("gemma3.rope.scaling.type", "yarn"));
    FAIL();
  } catch (const Mismatch& error) {
    EXPECT_TRUE(Says(error.what(), {"gemma3.rope.scaling.type", "'yarn'"}));
  }
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
  refused("num_layers", [](auto& c) { c.layers.clear(); });
  refused("num_heads", [](auto& c) { Set(c, "num_heads", 0); });
  refused("kv_heads", [](auto& c) { Set(c, "kv_heads", 0); });
  refused("kv_heads", [](auto& c) { Set(c, "kv_heads", 3); });
  refused("head_dim", [](auto& c) { Set(c, "head_dim", 100); });
  refused("head_dim", [](auto& c) { Set(c, "head_dim", 1024); });
  refused("shares_kv", [](auto& c) { c.layers[0].shares_kv = 0; });
  refused("shares_kv", [](auto& c) { c.layers[7].shares_kv = 5; });
  refused("shares_kv", [](auto& c) {
    c.layers[1].shares_kv = 0;
    c.layers[2].shares_kv = 1;
  });
  refused("rope_base_sliding of layer 9", [](auto& c) {
    c.layers[9].rope_base = std::numeric_limits<double>::quiet_NaN();
  });
  refused("sliding_window", [](auto& c) { Set(c, "sliding_window", 0); });
  refused("rms_epsilon", [](auto& c) { c.rms_epsilon = -1; });
  refused("query_scale", [](auto& c) {
    c.query_scale = std::numeric_limits<double>::quiet_NaN();
  });
  refused("rope_base_full", [](auto& c) { Set(c, "rope_base_full", 1); });
  refused("rope_factor_full", [](auto& c) { Set(c, "rope_factor_full", 0.5); });
  refused("rope_dim", [](auto& c) { Set(c, "rope_dim", 257); });
  refused("rope_dim", [](auto& c) { Set(c, "rope_dim", 31); });
  refused("still_pairs is 129 in layer 0",
          [](auto& c) { Set(c, "still_pairs", 129); });
  refused("embedding_scale", [](auto& c) {
    c.embedding_scale = std::numeric_limits<float>::infinity();
  });
  refused("lru_width", [](auto& c) { c.lru_width = 64; });
  refused("lru_width",
          [](auto& c) { c.layers[0].kind = LayerKind::kRecurrent; });
  refused("lru_width", [](auto& c) {
    c.layers[0].kind = LayerKind::kRecurrent;
    c.lru_width = 640, c.lru_blocks = 3, c.conv_width = 4;
  });
  refused("ple_vocab is 262144, expected 0 without ple_dim",
          [](auto& c) { c.ple_vocab = 262144; });
  refused("ple_vocab is 0, expected at least vocab_size 262144 with ple_dim 8",
          [](auto& c) { c.ple_dim = 8; });
  refused("ple_dim is 4097", [](auto& c) { c.ple_dim = 4097; });
  refused("num_experts is 8, expected 0 for a gemma3 model", [](auto& c) {
    c.num_experts = 8, c.experts_used = 2, c.expert_ffn_dim = 64;
  });
  const auto experts = [](size_t count, size_t used, size_t ffn) {
    return [=](ModelConfig& c) {
      c.architecture = "gemma4";
      c.num_experts = count, c.experts_used = used, c.expert_ffn_dim = ffn;
    };
  };
  refused("experts_used is 9, expected 1..8", experts(8, 9, 64));
  refused("experts_used is 0, expected 1..8", experts(8, 0, 64));
  refused("experts_used is 2, expected 0 without", experts(0, 2, 0));
  refused("expert_ffn_dim is 64, expected 0 without", experts(0, 0, 64));
  refused("expert_ffn_dim is 8, expected a multiple", experts(8, 2, 8));
  refused("hidden_size is 648, expected a multiple of 16 with num_experts 8",
          [&](auto& c) {
            experts(8, 2, 64)(c);
            c.hidden_size = 648;
          });
  refused("altup_inputs is 1", [](auto& c) { c.altup_inputs = 1; });
  refused("altup_inputs is 9", [](auto& c) { c.altup_inputs = 9; });
  refused("altup_active is 1, expected 0 without altup_inputs",
          [](auto& c) { c.altup_active = 1; });
  refused("altup_active is 3, expected less than altup_inputs 3",
          [](auto& c) { c.altup_inputs = c.altup_active = 3; });
  refused("altup_correct_scale is 1, expected 0 without",
          [](auto& c) { c.altup_correct_scale = true; });
  refused("layer_scales is 1, expected 0 with altup_inputs 2", [](auto& c) {
    c.altup_inputs = 2;
    c.layer_scales = true;
  });
  refused("sparsity_cutoff of layer 2", [](auto& c) {
    c.layers[2].sparsity_cutoff = std::numeric_limits<double>::infinity();
  });
  refused("eos id", [](auto& c) { c.eos_ids = {-1}; });
}

TEST(CreateKVCacheTest, DefaultsToTheContextAndChecksTheCapacity) {
  const auto cache = CreateConversation(ModelType::kGemma3_270M);
  EXPECT_EQ(cache->capacity_tokens(), 32768u);
  EXPECT_EQ(cache->model_type(), "gemma3-270m");
  EXPECT_EQ(cache->length(), 0u);
  EXPECT_EQ(cache->nbytes(), 0u) << "nothing is allocated before a token";
  EXPECT_EQ(CreateConversation(ModelType::kGemma3_4B, {.capacity_tokens = 10})
                ->capacity_tokens(),
            10u);
  EXPECT_THROW(
      CreateConversation(ModelType::kGemma3_270M, {.capacity_tokens = 32769}),
      InvalidArgument);
  EXPECT_THROW(
      CreateConversation(ModelType::kGemma3_270M, {.block_tokens = 48}),
      InvalidArgument);
}

TEST(ApplyFamilyTest, UnknownArchitecture) {
  ModelConfig config;
  try {
    ApplyFamily("gemma9", config);
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(Says(error.what(),
                     {"architecture", "'gemma9'", "'gemma'", "'gemma2'",
                      "'gemma3'", "'gemma3n'", "'gemma4'", "'gemma4-assistant'",
                      "'vaultgemma'", "'gemma-embedding'", "'embeddinggemma2'",
                      "'recurrentgemma'"}));
  }
  EXPECT_EQ(config.architecture, "");
}

}  // namespace
}  // namespace gkv
