#include "model/embedding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "base/sanitized.h"
#include "base/says.h"
#include "model/create_conversation.h"
#include "model/reference_model.h"
#include "model/tiny_model.h"
#include "ops/target.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Vectors = std::vector<std::vector<float>>;

Vectors VectorsOf(EmbeddingPass& pass, size_t size,
                  const std::vector<Tokens>& texts) {
  Vectors vectors(texts.size(), std::vector<float>(size));
  std::vector<EmbeddingPass::Text> views;
  for (size_t t = 0; t < texts.size(); ++t) {
    views.push_back({texts[t], vectors[t].data()});
  }
  pass.Run(views);
  return vectors;
}

Vectors VectorsOf(const Model& model, size_t threads,
            const std::vector<Tokens>& texts) {
  ThreadPool pool(threads);
  EmbeddingPass pass(model, pool);
  return VectorsOf(pass, VectorSize(model.config), texts);
}

std::vector<Tokens> Texts(const std::vector<size_t>& lengths) {
  std::vector<Tokens> texts;
  for (const size_t length : lengths) {
    texts.push_back(RandomTokens(length, static_cast<uint32_t>(length)));
  }
  return texts;
}

// Around the window, and of several.
const std::vector<size_t> kShortLengths = {60, 1, 24, 25, 7};
const std::vector<size_t> kLengths =
    kSanitized ? kShortLengths
               : std::vector<size_t>{90, 1, 24, 25, 200, 7, 129};

double WorstDifference(const TinyOptions& options,
                       const std::function<void(ModelConfig&)>& wrong = {}) {
  MemorySource source = TinyTensors(options);
  ModelConfig config = TinyConfig(options);
  if (wrong) wrong(config);
  const ReferenceModel reference(config, source);
  const auto model = TinyModel(options);
  const std::vector<Tokens> texts = Texts(kShortLengths);
  const Vectors found = VectorsOf(*model, 2, texts);
  double worst = 0;
  for (size_t t = 0; t < texts.size(); ++t) {
    std::vector<float> unit(found[t].size());
    UnitVector(found[t].data(), unit.size(), unit.data());
    const ReferenceModel::Row expected = reference.Embedding(texts[t]);
    for (size_t i = 0; i < unit.size(); ++i) {
      worst = std::max(
          worst, std::abs(static_cast<double>(unit[i]) - expected[i]));
    }
  }
  return worst;
}

TinyOptions Embedding() { return TinyFamily("gemma-embedding"); }
TinyOptions Embedding2() { return TinyFamily("embeddinggemma2"); }

TEST(EmbeddingPassTest, MatchesReference) {
  EXPECT_LT(WorstDifference(Embedding()), 3e-6);
}

TEST(EmbeddingPassTest, MatchesReferenceOfTheSecondGeneration) {
  EXPECT_LT(WorstDifference(Embedding2()), 3e-6);
  for (const int step : {-1, 1}) {
    EXPECT_GT(WorstDifference(Embedding2(),
                              [&](ModelConfig& config) {
                                config.layers[0].window +=
                                    static_cast<size_t>(step);
                              }),
              1e-4)
        << step;
  }
}

TEST(EmbeddingPassTest, MatchesReferenceWithoutProductsBehindTheMean) {
  TinyOptions options = Embedding();
  options.dense_dim = 0;
  EXPECT_LT(WorstDifference(options), 3e-6);
}

TEST(EmbeddingPassTest, MatchesReferenceWithLayersOfSeveralShapes) {
  TinyOptions options = Embedding();
  options.change = [](ModelConfig& config) {
    for (LayerConfig& layer : config.layers) {
      if (layer.kind != LayerKind::kFull) continue;
      layer.head_dim = layer.rope_dim = 64;
      layer.kv_heads = 1;
    }
    config.layers[0].window = 3;
  };
  EXPECT_LT(WorstDifference(options), 3e-6);
}

TEST(EmbeddingPassTest, AnotherMaskWouldShow) {
  EXPECT_GT(WorstDifference(Embedding(),
                            [](ModelConfig& c) { c.bidirectional = false; }),
            1e-3);
  for (const int step : {-1, 1}) {
    EXPECT_GT(WorstDifference(Embedding(),
                              [&](ModelConfig& config) {
                                for (LayerConfig& layer : config.layers) {
                                  layer.window += static_cast<size_t>(step);
                                }
                              }),
              1e-4)
        << step;
  }
}

struct BitsCase {
  const char* name;
  TinyOptions options;
};

class EmbeddingBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  const std::shared_ptr<const Model> model_ = TinyModel(GetParam().options);
  const std::vector<Tokens> texts_ = Texts(kLengths);
  const Vectors expected_ = VectorsOf(*model_, 1, texts_);
};

TEST_P(EmbeddingBitsTest, SameAlone) {
  for (size_t t = 0; t < texts_.size(); ++t) {
    EXPECT_EQ(VectorsOf(*model_, 1, {texts_[t]})[0], expected_[t]) << t;
  }
}

TEST_P(EmbeddingBitsTest, SameInAnyOrderAndWithAnyThreads) {
  std::vector<Tokens> reversed(texts_.rbegin(), texts_.rend());
  for (const size_t threads : {2, 3, 8}) {
    if (kSanitized && threads != 3) continue;
    Vectors found = VectorsOf(*model_, threads, reversed);
    std::reverse(found.begin(), found.end());
    EXPECT_EQ(found, expected_) << threads;
  }
}

TEST_P(EmbeddingBitsTest, NothingOfOtherTextsIsLeftBehind) {
  ThreadPool pool(2);
  EmbeddingPass pass(*model_, pool);
  const size_t size = VectorSize(model_->config);
  (void)VectorsOf(pass, size, Texts({300, 299, 298}));
  EXPECT_EQ(VectorsOf(pass, size, texts_), expected_);
  (void)VectorsOf(pass, size, Texts({5}));
  EXPECT_EQ(VectorsOf(pass, size, texts_), expected_);
}

TEST_P(EmbeddingBitsTest, SameOnEveryTargetWithFusedMultiplyAdd) {
  const uint32_t id = NumericsId();
  size_t compared = 0;
  for (const std::string& target : AttainableTargets()) {
    ForceTarget(target);
    if (NumericsId() == id) {
      EXPECT_EQ(VectorsOf(*model_, 1, texts_), expected_) << target;
      ++compared;
    }
  }
  ForceTarget("");
  EXPECT_GE(compared, 1u);
}

INSTANTIATE_TEST_SUITE_P(
    Models, EmbeddingBitsTest,
    ::testing::Values(BitsCase{"F32", Embedding()},
                      BitsCase{"Quantized", MixedTypes(Embedding())},
                      BitsCase{"SecondGeneration", Embedding2()},
                      BitsCase{"SecondGenerationQuantized",
                               MixedTypes(Embedding2())}),
    [](const auto& info) { return info.param.name; });

TEST(UnitVectorTest, HasLengthOneWhateverItIsCutTo) {
  const float vector[] = {3e-20f, 4e-20f, 1, -7};
  float unit[4];
  UnitVector(vector, 2, unit);
  EXPECT_FLOAT_EQ(unit[0], 0.6f);
  EXPECT_FLOAT_EQ(unit[1], 0.8f);
  const float zeros[2] = {};
  UnitVector(zeros, 2, unit);
  EXPECT_EQ(unit[0], 0);
  EXPECT_EQ(unit[1], 0);
}

TEST(UnitVectorTest, DoesNotDependOnItsCallersRounding) {
  std::vector<float> vector(768), expected(768), found(768);
  for (size_t i = 0; i < vector.size(); ++i) {
    vector[i] = static_cast<float>(i % 31) - 15.3f;
  }
  UnitVector(vector.data(), vector.size(), expected.data());
  {
    const OddFpEnvironment odd;
    UnitVector(vector.data(), vector.size(), found.data());
  }
  EXPECT_EQ(found, expected);
}

TEST(EmbeddingDimsTest, AreThoseOfThePublishedModel) {
  EXPECT_EQ(EmbeddingDims(ConfigOf(ModelType::kEmbeddingGemma_300M)),
            (std::vector<size_t>{768, 512, 256, 128}));
  EXPECT_EQ(EmbeddingDims(ConfigOf(ModelType::kEmbeddingGemma_2)),
            (std::vector<size_t>{768, 512, 256, 128}));
  ModelConfig config = TinyConfig(Embedding());
  EXPECT_EQ(EmbeddingDims(config), std::vector<size_t>{config.hidden_size});
  config.hidden_size = 256;
  EXPECT_EQ(EmbeddingDims(config), (std::vector<size_t>{256, 128}));
  EXPECT_EQ(EmbeddingDims(ConfigOf(ModelType::kGemma3_270M)),
            std::vector<size_t>{640});
}

TEST(EmbeddingModelTest, HasNoConversations) {
  try {
    (void)CreateConversation(ModelType::kEmbeddingGemma_300M);
    ADD_FAILURE();
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(Says(error.what(), {"embeddinggemma-300m", "expected embed"}));
  }
}

}  // namespace
}  // namespace gkv
