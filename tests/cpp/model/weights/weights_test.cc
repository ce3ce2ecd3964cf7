#include "model/weights/weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "base/sanitized.h"
#include "model/tiny_model.h"

namespace gkv {
namespace {

Weights Load(MemorySource& source, const TinyOptions& options,
             size_t threads = 1, const LoadProgress& progress = {}) {
  ThreadPool pool(threads);
  return LoadWeights(TinyConfig(options), source, pool, progress);
}

TEST(WeightsTest, RowsAreThoseOfTheSource) {
  const TinyOptions options;
  MemorySource source = TinyTensors(options);
  const Weights weights = Load(source, options, 2);
  const std::vector<float> expected = source.Floats("blk.3.ffn_down.weight");
  const PackedView view = weights.layers[3].down.view();
  ASSERT_EQ(view.rows * view.cols, expected.size());
  std::vector<float> row(view.cols);
  for (size_t r = 0; r < view.rows; ++r) {
    UnpackRow(view, r, row.data());
    EXPECT_EQ(std::memcmp(row.data(), &expected[r * view.cols],
                          view.cols * sizeof(float)),
              0)
        << r;
  }
  const std::vector<float> norm = source.Floats("output_norm.weight");
  EXPECT_TRUE(std::equal(norm.begin(), norm.end(), weights.final_norm.data()));
}

void ExpectError(MemorySource& source, const TinyOptions& options,
                 const std::string& message) {
  try {
    Load(source, options);
    FAIL() << "loaded, expected: " << message;
  } catch (const CorruptFile& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos)
        << error.what();
  }
}

// Which tensors a model has depends on its family.
class WeightsOfFamilyTest : public ::testing::TestWithParam<std::string> {
 protected:
  const TinyOptions options_ = TinyFamily(GetParam());
};

TEST_P(WeightsOfFamilyTest, FingerprintIsOfContentNotOfThreads) {
  const TinyOptions options = MixedTypes(options_);
  MemorySource source = TinyTensors(options);
  const Hash128 expected = Load(source, options).fingerprint;
  EXPECT_EQ(Load(source, options, 3).fingerprint, expected);
  // Any byte of any tensor counts.
  size_t count = 0;
  for (auto& [name, tensor] : source.tensors) {
    if (kSanitized && count++ % 8 != 0) continue;
    uint8_t& byte = tensor.bytes[tensor.bytes.size() / 2];
    byte ^= 1;
    EXPECT_NE(Load(source, options).fingerprint, expected) << name;
    byte ^= 1;
  }
  TinyOptions cap = options;
  cap.final_soft_cap += 1;
  EXPECT_NE(Load(source, cap).fingerprint, expected);
}

TEST_P(WeightsOfFamilyTest, TensorsThatTheModelLacksAreNamed) {
  const MemorySource whole = TinyTensors(options_);
  const MemorySource::Tensor some = whole.tensors.at("blk.0.attn_norm.weight");
  const std::string behind =
      StrCat("blk.", TinyConfig(options_).num_layers(), ".attn_norm.weight");
  for (const std::string& name : std::vector<std::string>{
           behind, "blk.0.attn_norm.bias", "blk.1.no_such.weight", "blk.",
           "norm.weight", "dense.0.weight", "zz.weight", "vision", "v",
           "cls.output.weight", "output_norm.bias"}) {
    MemorySource source = whole;
    source.tensors[name] = some;
    ExpectError(source, options_, "found tensor " + name + ", expected none");
  }
  // What stands beside a model is left alone.
  MemorySource beside = whole;
  for (const char* name :
       {"v.blk.0.attn_q.weight", "mm.input_projection.weight",
        "a.blk.0.attn_q.weight", "model.vision_tower.x",
        "multi_modal_projector.x", "model.vision_embedder.pos_embedding",
        "model.embed_audio.x"}) {
    beside.tensors[name] = some;
  }
  MemorySource alone = whole;
  EXPECT_EQ(Load(beside, options_).fingerprint,
            Load(alone, options_).fingerprint);
}

TEST(WeightsTest, LayersThatShareKeysAndValuesMayHaveProductsForThem) {
  TinyOptions options;
  options.change = [](ModelConfig& config) {
    config.layers.back().shares_kv = 0;
  };
  MemorySource source = TinyTensors(options);
  const Hash128 alone = Load(source, options).fingerprint;
  for (const char* name :
       {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}) {
    source.tensors[StrCat("blk.6.", name)] =
        source.tensors.at(StrCat("blk.0.", name));
  }
  EXPECT_EQ(Load(source, options).fingerprint, alone);
  source.tensors["blk.6.attn_k.bias"] =
      source.tensors.at("blk.0.attn_k.weight");
  ExpectError(source, options, "found tensor blk.6.attn_k.bias");
}

// What the configuration was read from, and what only families that have it
// may have.
TEST(WeightsTest, DivisorsOfFrequenciesAreOfFamiliesWithStillPairs) {
  MemorySource source = TinyTensors(TinyFamily("gemma3"));
  source.tensors["rope_freqs.weight"] = source.tensors.at("output_norm.weight");
  ExpectError(source, TinyFamily("gemma3"), "found tensor rope_freqs.weight");
  source = TinyTensors(TinyFamily("gemma4"));
  const Hash128 alone = Load(source, TinyFamily("gemma4")).fingerprint;
  source.tensors["rope_freqs.weight"] = source.tensors.at("output_norm.weight");
  EXPECT_EQ(Load(source, TinyFamily("gemma4")).fingerprint, alone);
}

TEST(WeightsTest, WeightsOfAnotherFamilyAreRefused) {
  MemorySource source = TinyTensors(TinyFamily("gemma2"));
  TinyOptions options = TinyFamily("gemma2");
  options.post_norms = false;
  ExpectError(source, options, "post_");
}

TEST_P(WeightsOfFamilyTest, MissingAndMisshapenTensorsAreNamed) {
  const MemorySource whole = TinyTensors(options_);
  for (const auto& [name, tensor] : whole.tensors) {
    MemorySource source = whole;
    source.tensors.erase(name);
    ExpectError(source, options_, "tensor " + name + " is missing");
    source = whole;
    source.tensors.at(name).rows += 1;
    ExpectError(source, options_, "tensor " + name + " has shape [");
  }
}

// Packed files of earlier builds are found by these: the order of the table,
// and how tensors are hashed, are kept.
TEST(WeightsTest, FingerprintsStay) {
  const struct {
    const char* family;
    bool mixed_and_untied;
    const char* fingerprint;
  } expected[] = {
      {"gemma", false, "de4f00e980fd2692e6298f1f8786ab3e"},
      {"gemma", true, "90d2ef85486198f96a81ba745e049ada"},
      {"gemma2", false, "c5e58f3f5de815733d7af57f629d6abd"},
      {"gemma2", true, "df92ad2262c6b80f49b0407f03cf8977"},
      {"gemma3", false, "64199d4da3408edc39e66b0dadf12505"},
      {"gemma3", true, "6aa4580a2d606a6eb139ee39b46b803c"},
      {"gemma3n", false, "c160eeb8a6e8959a548ad85d5a1c5e6b"},
      {"gemma3n", true, "2c8fb4c7656e99eb02cc7f7d9241947e"},
      {"gemma4", false, "32fd82711336ae698cad3d835da6d777"},
      {"gemma4", true, "8fd5be714e5c5ceb02d99440c2115a41"},
      {"gemma4_moe", false, "a443425d71464f10a7479204795824f9"},
      {"gemma4_moe", true, "eea78e3e24db10d4c4bee94ee4c89ff0"},
      {"recurrentgemma", false, "aa6de4cd26fec67619024b251380e7e4"},
      {"recurrentgemma", true, "a407fe7888be77341b27e0e24a7d22f3"},
  };
  for (const auto& [family, mixed_and_untied, fingerprint] : expected) {
    TinyOptions options = TinyFamily(family);
    if (mixed_and_untied) {
      options = MixedTypes(options);
      options.tied = false;
    }
    MemorySource source = TinyTensors(options);
    EXPECT_EQ(Load(source, options).fingerprint.Hex(), fingerprint) << family;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, WeightsOfFamilyTest,
                         ::testing::ValuesIn(TinyFamilies(true)),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Sources have the gates of experts with what they gate, or apart.
TEST(WeightsTest, GatesOfExpertsAreInOneFormOrTheOther) {
  const TinyOptions options = TinyFamily("gemma4_moe");
  TinyOptions split = options;
  split.split_experts = true;
  MemorySource source = TinyTensors(options), other = TinyTensors(split);
  EXPECT_EQ(Load(source, options).layers[1].experts->gate.rows, 0u);
  EXPECT_EQ(Load(other, options).layers[1].experts->gate_up.rows, 0u);
  const auto with = [&](const MemorySource& from, const char* more,
                        const char* without, const std::string& message) {
    MemorySource changed = from;
    if (*more != 0) {
      const MemorySource& has = source.tensors.contains(more) ? source : other;
      changed.tensors[more] = has.tensors.at(more);
    }
    changed.tensors.erase(without);
    ExpectError(changed, options, message);
  };
  with(source, "blk.1.ffn_gate_exps.weight", "",
       "tensor blk.1.ffn_gate_up_exps.weight is there beside "
       "blk.1.ffn_gate_exps.weight, expected one of them");
  with(source, "blk.1.ffn_up_exps.weight", "",
       "tensor blk.1.ffn_up_exps.weight is there beside "
       "blk.1.ffn_gate_up_exps.weight, expected one of them");
  with(source, "", "blk.1.ffn_gate_up_exps.weight",
       "tensor blk.1.ffn_gate_up_exps.weight is missing, expected shape "
       "[9, 64, 64], or blk.1.ffn_gate_exps.weight");
  with(other, "", "blk.1.ffn_gate_exps.weight",
       "tensor blk.1.ffn_gate_up_exps.weight is missing");
  with(other, "", "blk.1.ffn_up_exps.weight",
       "tensor blk.1.ffn_up_exps.weight is missing, expected shape "
       "[9, 32, 64]");
}

TEST(WeightsTest, ExpertsOfAnotherShapeAreRefused) {
  const TinyOptions options = TinyFamily("gemma4_moe");
  MemorySource source = TinyTensors(options);
  MemorySource::Tensor& down = source.tensors.at("blk.2.ffn_down_exps.weight");
  down.parts = 18;
  ExpectError(source, options,
              "tensor blk.2.ffn_down_exps.weight has shape [18, 32, 32], "
              "expected [9, 64, 32]");
  down.parts = 1;
  ExpectError(source, options,
              "has shape [576, 32], expected [9, 64, 32]");
  down.parts = 9;
  source.tensors.at("blk.2.ffn_down.weight").parts = 2;
  ExpectError(source, options, "tensor blk.2.ffn_down.weight has shape [2, ");
}

TEST(WeightsTest, QuantizedRoutersAreRefused) {
  const TinyOptions options = TinyFamily("gemma4_moe");
  MemorySource source = TinyTensors(options);
  std::mt19937 rng(1);
  source.tensors.at("blk.0.ffn_gate_inp.weight") = {
      TensorType::kQ8_0, 9, 64,
      RandomTensor(TensorType::kQ8_0, 9, 64, rng, 0, 0)};
  ExpectError(source, options,
              "tensor blk.0.ffn_gate_inp.weight has type Q8_0, expected F32");
}

// Files have it whether the configuration asks for it or not.
TEST(WeightsTest, AScaleThatIsNotAskedForIsLeftAlone) {
  TinyOptions options = TinyFamily("gemma3n");
  MemorySource source = TinyTensors(options);
  options.altup_correct_scale = false;
  const Weights weights = Load(source, options);
  EXPECT_EQ(weights.layers[0].altup_scale.size(), 0u);
  EXPECT_EQ(weights.layers[0].altup_router.size(), 4 * options.hidden);
  options.altup_inputs = 0;
  ExpectError(source, options, "found tensor altup_proj.0.weight, expected");
}

TEST(WeightsTest, AShapeErrorSaysWhatWasExpected) {
  const TinyOptions options;
  MemorySource source = TinyTensors(options);
  source.tensors.at("blk.0.attn_q.weight").rows -= 1;
  ExpectError(source, options, "[127, 64], expected [128, 64]");
}

TEST(WeightsTest, PartsOfRecurrentLayersAreWhereTheyBelong) {
  const TinyOptions options = TinyFamily("recurrentgemma");
  MemorySource source = TinyTensors(options);
  const Weights weights = Load(source, options);
  EXPECT_EQ(weights.layers[2].recurrent, nullptr) << "an attention layer";
  const RecurrentWeights& layer = *weights.layers[1].recurrent;
  const std::vector<float> taps = source.Floats("blk.1.rec_conv.weight");
  const std::vector<float> param = source.Floats("blk.1.rec_a_param");
  const size_t width = options.lru_width;
  for (size_t c = 0; c < width; ++c) {
    for (size_t k = 0; k < options.conv_width; ++k) {
      EXPECT_EQ(layer.conv_taps[k * width + c],
                taps[c * options.conv_width + k]);
    }
    EXPECT_NEAR(layer.decay[c],
                -8 * std::log1p(std::exp(static_cast<double>(param[c]))), 1e-5);
  }
}

// exp(-100) is subnormal, and so is a decay of that size.
TEST(WeightsTest, FlushToZeroOfTheCallerDoesNotMatter) {
  const TinyOptions options = TinyFamily("recurrentgemma");
  MemorySource source = TinyTensors(options);
  const std::vector<float> params(options.lru_width, -100.0f);
  std::memcpy(source.tensors.at("blk.0.rec_a_param").bytes.data(),
              params.data(), params.size() * sizeof(float));
  const Weights expected = Load(source, options);
  const FlushToZero flush;
  const Weights weights = Load(source, options);
  // As bits: subnormals compare equal to zero here.
  const FloatVector& decay = weights.layers[0].recurrent->decay;
  const float zeros[2] = {0.0f, -0.0f};
  EXPECT_NE(std::memcmp(&decay[0], &zeros[0], sizeof(float)), 0);
  EXPECT_NE(std::memcmp(&decay[0], &zeros[1], sizeof(float)), 0);
  EXPECT_EQ(
      std::memcmp(decay.data(), expected.layers[0].recurrent->decay.data(),
                  options.lru_width * sizeof(float)),
      0);
}

// What is not the model's is not asked for, whatever it is, and does not count
// towards the total.
TEST(WeightsTest, TensorsBesideTheModelAreLeftAlone) {
  class Beside : public MemorySource {
   public:
    std::optional<TensorView> Find(std::string_view name) override {
      if (name == "v.patch_embd.weight") throw CorruptFile("4 dimensions");
      return MemorySource::Find(name);
    }
  };
  const TinyOptions options;
  Beside source;
  source.tensors = TinyTensors(options).tensors;
  source.tensors["v.patch_embd.weight"] = {
      TensorType::kF32, 1, 1, {0, 0, 0, 0}};
  size_t last = 0, total = 1;
  Load(source, options, 1, [&](size_t done, size_t all) {
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
}

TEST(WeightsTest, QuantizedGatesAreRefused) {
  TinyOptions options = TinyFamily("recurrentgemma");
  options.lru_width = 256;
  MemorySource source = TinyTensors(options);
  std::mt19937 rng(1);
  source.tensors.at("blk.0.rec_a_gate.weight") = {
      TensorType::kQ8_0, 256, 64,
      RandomTensor(TensorType::kQ8_0, 256, 64, rng, 0, 0)};
  ExpectError(source, options,
              "tensor blk.0.rec_a_gate.weight has type Q8_0, expected F32");
}

TEST(WeightsTest, NormsOfAQuantizedTypeAreRefused) {
  const TinyOptions options;
  MemorySource source = TinyTensors(options);
  std::mt19937 rng(1);
  source.tensors["output_norm.weight"] = {
      TensorType::kQ8_0, 1, 64,
      RandomTensor(TensorType::kQ8_0, 1, 64, rng, 0, 0)};
  EXPECT_THROW(Load(source, options), CorruptFile);
}

TEST(WeightsTest, ProgressReachesTheTotalAndMayStopTheLoad) {
  const TinyOptions options;
  MemorySource source = TinyTensors(options);
  size_t last = 0, total = 0;
  Load(source, options, 1, [&](size_t done, size_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
  EXPECT_GT(total, 0u);
  EXPECT_THROW(Load(source, options, 1,
                    [](size_t, size_t) { throw std::runtime_error("enough"); }),
               std::runtime_error);
}

TEST_P(WeightsOfFamilyTest, EverySourceByteIsReleasedOnce) {
  // Counts what is given back.
  class Counting : public MemorySource {
   public:
    std::map<std::string, size_t> released;
    void Release(const TensorView& view, size_t begin, size_t end) override {
      EXPECT_EQ(released[view.name], begin);
      released[view.name] = end;
    }
  };
  const TinyOptions options = MixedTypes(options_);
  Counting source;
  source.tensors = TinyTensors(options).tensors;
  Load(source, options, 2);
  for (const auto& [name, tensor] : source.tensors) {
    EXPECT_EQ(source.released[name], tensor.bytes.size()) << name;
  }
}

}  // namespace
}  // namespace gkv
