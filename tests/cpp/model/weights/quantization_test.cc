#include "model/weights/quantization.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/flush_to_zero.h"
#include "base/says.h"
#include "gtest/gtest.h"
#include "io/temp_folder.h"
#include "model/tiny_model.h"
#include "model/weights/packed_weights.h"
#include "model/weights/weight_table.h"
#include "ops/quantize_weights.h"

namespace gkv {
namespace {

TensorView Matrix(const std::string& name, TensorType type, size_t cols = 64) {
  return {name, type, 8, cols, nullptr};
}

// What the table of weights says about a tensor.
WeightRole RoleOf(const std::string& name) {
  for (const std::string& family : TinyFamilies(true)) {
    Weights weights;
    for (const WeightEntry& entry :
         ListWeights(TinyConfig(TinyFamily(family)), weights)) {
      if (entry.name == name) return entry.role;
    }
  }
  ADD_FAILURE() << "no tensor is called " << name;
  return WeightRole::kMatrix;
}

TensorType KeptType(const TensorView& matrix,
                    std::optional<TensorType> target) {
  return gkv::KeptType(matrix, RoleOf(matrix.name), target);
}

template <typename E>
std::string MessageOf(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(QuantizationTest, NamesOfTargets) {
  EXPECT_EQ(QuantizeTargetFromName("q8_0"), TensorType::kQ8_0);
  EXPECT_EQ(QuantizeTargetFromName("q5_0"), TensorType::kQ5_0);
  EXPECT_EQ(QuantizeTargetFromName("q4_0"), TensorType::kQ4_0);
  EXPECT_EQ(QuantizeTargetFromName("bf16"), TensorType::kBF16);
  for (const char* name : {"", "Q8_0", "q4_k", "f16", "q8_0 "}) {
    EXPECT_TRUE(Says(
        MessageOf<InvalidArgument>([&] { QuantizeTargetFromName(name); }),
        {"quantize", "q8_0, q5_0, q4_0, bf16", StrCat('"', name, '"')}));
  }
}

TEST(QuantizationTest, WhatMatricesAreKeptAs) {
  using enum TensorType;
  for (const TensorType type : {kF32, kF16, kBF16}) {
    EXPECT_EQ(KeptType(Matrix("blk.0.attn_q.weight", type), {}), type);
    for (const TensorType target : {kQ8_0, kQ5_0, kQ4_0, kBF16}) {
      const TensorType head = target == kBF16 ? kBF16 : kQ8_0;
      EXPECT_EQ(KeptType(Matrix("blk.0.attn_q.weight", type), target), target);
      EXPECT_EQ(KeptType(Matrix("token_embd.weight", type), target), head);
      EXPECT_EQ(KeptType(Matrix("output.weight", type), target), head);
      EXPECT_EQ(KeptType(Matrix("blk.0.rec_x.weight", type), target), target);
      EXPECT_EQ(KeptType(Matrix("blk.0.ffn_down_exps.weight", type), target),
                target);
      for (const char* gate :
           {"blk.0.rec_input_gate.weight", "blk.0.rec_a_gate.weight",
            "blk.0.ffn_gate_inp.weight"}) {
        EXPECT_EQ(KeptType(Matrix(gate, type), target), type);
      }
    }
  }
  for (const TensorType type : {kQ8_0, kQ4_0, kQ6_K}) {
    EXPECT_EQ(KeptType(Matrix("blk.0.attn_q.weight", type), kBF16), type);
  }
}

TEST(QuantizationTest, WhatCannotBeKept) {
  using enum TensorType;
  EXPECT_TRUE(Says(
      MessageOf<InvalidArgument>([] {
        (void)KeptType(Matrix("blk.2.ffn_up.weight", kF32, 48), kQ5_0);
      }),
      {"quantize", "blk.2.ffn_up.weight", "48", "multiple of 32", "Q5_0"}));
  EXPECT_EQ(KeptType(Matrix("blk.2.ffn_up.weight", kF32, 48), kBF16), kBF16);
  EXPECT_TRUE(Says(MessageOf<InvalidArgument>([] {
                     (void)KeptType(Matrix("blk.2.ffn_up.weight", kF32), kQ6_K);
                   }),
                   {"quantize", "q8_0, q5_0, q4_0, bf16", "Q6_K"}));
}

// What a file that was quantized beforehand would hold.
MemorySource Quantized(MemorySource source, TensorType target) {
  for (auto& [name, tensor] : source.tensors) {
    if (tensor.rows == 1) continue;
    const TensorView view{name, tensor.type, tensor.rows, tensor.cols,
                          tensor.bytes.data()};
    const TensorType kept = KeptType(view, target);
    if (kept == tensor.type) continue;
    std::vector<uint8_t> bytes(tensor.rows * RowBytes(kept, tensor.cols));
    EXPECT_TRUE(QuantizeWeights(tensor.type, tensor.bytes.data(),
                                tensor.rows * tensor.cols, kept, bytes.data()));
    tensor.type = kept;
    tensor.bytes = std::move(bytes);
  }
  return source;
}

bool SameMatrix(const PackedMatrix& a, const PackedMatrix& b) {
  if (a.rows == 0) return b.rows == 0;  // there is none
  return a.type == b.type && a.rows == b.rows && a.cols == b.cols &&
         std::memcmp(a.data, b.data,
                     NumGroups(a.rows) * GroupBytes(a.type, a.cols)) == 0;
}

void ExpectSameMatrices(const Weights& a, const Weights& b) {
  EXPECT_TRUE(SameMatrix(a.embedding, b.embedding));
  EXPECT_EQ(a.head.rows, b.head.rows);
  if (a.head.rows != 0) {
    EXPECT_TRUE(SameMatrix(a.head, b.head));
  }
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) {
    for (const auto matrix :
         {&LayerWeights::q, &LayerWeights::k, &LayerWeights::v,
          &LayerWeights::o, &LayerWeights::gate, &LayerWeights::up,
          &LayerWeights::down}) {
      EXPECT_TRUE(SameMatrix(a.layers[i].*matrix, b.layers[i].*matrix));
    }
    ASSERT_EQ(a.layers[i].experts == nullptr, b.layers[i].experts == nullptr);
    if (!a.layers[i].experts) continue;
    for (const auto matrix :
         {&ExpertWeights::router, &ExpertWeights::gate_up,
          &ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
      EXPECT_TRUE(SameMatrix((*a.layers[i].experts).*matrix,
                             (*b.layers[i].experts).*matrix));
    }
  }
}

constexpr TensorType kTargets[] = {TensorType::kQ8_0, TensorType::kQ5_0,
                                   TensorType::kQ4_0, TensorType::kBF16};

// More rows than a slab, several slabs to a batch, quantized matrices between.
TinyOptions SomeFloats() {
  TinyOptions options;
  options.types = {TensorType::kF32, TensorType::kQ4_0, TensorType::kBF16,
                   TensorType::kQ8_0, TensorType::kF16};
  options.ffn = 1184;
  options.num_layers = 3;
  options.tied = false;
  return options;
}

// The same, with experts: more rows of them than a slab.
TinyOptions SomeFloatExperts(bool split) {
  TinyOptions options = TinyFamily("gemma4_moe");
  options.types = SomeFloats().types;
  options.num_layers = 3;
  options.num_experts = 21;
  options.split_experts = split;
  return options;
}

void ExpectAsIfTheSourceHadBeenQuantized(const TinyOptions& options) {
  const ModelConfig config = TinyConfig(options);
  MemorySource source = TinyTensors(options);
  ThreadPool one(1), two(2);
  TempFolder folder;
  std::vector<Hash128> fingerprints = {
      LoadWeights(config, source, one, {}).fingerprint};
  for (const TensorType target : kTargets) {
    MemorySource quantized = Quantized(source, target);
    const Weights expected = LoadWeights(config, quantized, one, {});
    for (ThreadPool* pool : {&one, &two}) {
      const Weights weights = LoadWeights(config, source, *pool, {}, target);
      ExpectSameMatrices(weights, expected);
      if (pool == &one) fingerprints.push_back(weights.fingerprint);
      EXPECT_EQ(weights.fingerprint, fingerprints.back());
    }
    for (const auto state :
         {PackedReport::State::kWritten, PackedReport::State::kReused}) {
      PackedReport report;
      PackedOptions packed{.folder = folder.path(), .quantize = target};
      const Weights weights =
          LoadPackedWeights(config, source, two, {}, packed, report);
      EXPECT_EQ(report.state, state);
      ExpectSameMatrices(weights, expected);
      EXPECT_EQ(weights.fingerprint, fingerprints.back());
    }
  }
  EXPECT_EQ(folder.Names().size(), std::size(kTargets));
  for (size_t i = 0; i < fingerprints.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(fingerprints[i], fingerprints[j]);
  }
}

TEST(QuantizationTest, AsIfTheSourceHadBeenQuantized) {
  ExpectAsIfTheSourceHadBeenQuantized(SomeFloats());
  ExpectAsIfTheSourceHadBeenQuantized(SomeFloatExperts(false));
  ExpectAsIfTheSourceHadBeenQuantized(SomeFloatExperts(true));
}

// Scales that are subnormal count, whatever the state of the calling thread.
TEST(QuantizationTest, FlushToZeroOfTheCallerDoesNotMatter) {
  const ModelConfig config = TinyConfig({});
  ThreadPool pool(1);
  // The largest magnitudes are about 0.2; 1 / scale is finite.
  for (const auto& [target, exponent] : {std::pair(TensorType::kQ8_0, -118),
                                         std::pair(TensorType::kQ4_0, -122)}) {
    MemorySource source = TinyTensors({});
    for (auto& [name, tensor] : source.tensors) {
      if (tensor.rows == 1) continue;
      std::vector<float> values = source.Floats(name);
      for (float& value : values) value = std::ldexp(value, exponent);
      std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    }
    const Weights expected = LoadWeights(config, source, pool, {}, target);
    const FlushToZero flush;
    ExpectSameMatrices(LoadWeights(config, source, pool, {}, target), expected);
  }
}

TEST(QuantizationTest, WhereNoFileCanBeMemoryServes) {
  const TinyOptions options = SomeFloats();
  MemorySource source = TinyTensors(options);
  ThreadPool pool(1);
  PackedReport report;
  const Weights weights = LoadPackedWeights(
      TinyConfig(options), source, pool, {},
      {.folder = "/proc/gemmakv", .quantize = TensorType::kQ5_0}, report);
  EXPECT_EQ(report.state, PackedReport::State::kMemory);
  const Weights expected =
      LoadWeights(TinyConfig(options), source, pool, {}, TensorType::kQ5_0);
  ExpectSameMatrices(weights, expected);
  EXPECT_EQ(weights.fingerprint, expected.fingerprint);
}

// Nothing is converted, so these are the same weights.
TEST(QuantizationTest, BF16OfBF16IsTheModelItself) {
  TinyOptions options;
  options.types = {TensorType::kBF16};
  MemorySource source = TinyTensors(options);
  ThreadPool pool(1);
  const ModelConfig config = TinyConfig(options);
  EXPECT_EQ(
      LoadWeights(config, source, pool, {}, TensorType::kBF16).fingerprint,
      LoadWeights(config, source, pool, {}).fingerprint);
}

TEST(QuantizationTest, NothingToQuantize) {
  TinyOptions options;
  options.types = {TensorType::kQ8_0, TensorType::kQ4_0};
  MemorySource source = TinyTensors(options);
  // Not the model's.
  source.tensors["v.blk.0.attn_q.weight"] = {TensorType::kF32, 2, 2,
                                             std::vector<uint8_t>(16)};
  ThreadPool pool(1);
  size_t progress = 0;
  const LoadProgress count = [&](size_t, size_t) { ++progress; };
  TempFolder folder;
  PackedReport report;
  for (const std::string& message :
       {MessageOf<InvalidArgument>([&] {
          LoadWeights(TinyConfig(options), source, pool, count,
                      TensorType::kQ4_0);
        }),
        MessageOf<InvalidArgument>([&] {
          LoadPackedWeights(
              TinyConfig(options), source, pool, count,
              {.folder = folder.path(), .quantize = TensorType::kQ4_0}, report);
        })}) {
    EXPECT_TRUE(Says(message, {"quantize", "test tensors", "Q4_0, Q8_0",
                               "F32, F16 or BF16"}));
  }
  EXPECT_EQ(progress, 0u);  // before anything was read
}

// A router that is float is no reason to quantize.
TEST(QuantizationTest, NothingToQuantizeBesideARouter) {
  TinyOptions options = TinyFamily("gemma4_moe");
  options.types = {TensorType::kQ8_0};
  MemorySource source = TinyTensors(options);
  ThreadPool pool(1);
  EXPECT_TRUE(Says(MessageOf<InvalidArgument>([&] {
                     LoadWeights(TinyConfig(options), source, pool, {},
                                 TensorType::kQ4_0);
                   }),
                   {"quantize", "test tensors", "Q8_0", "F32, F16 or BF16"}));
}

// Every place of a matrix, whatever the thread that meets it.
TEST(QuantizationTest, ValuesThatCannotBe) {
  const TinyOptions options = SomeFloats();
  const ModelConfig config = TinyConfig(options);
  ThreadPool pool(2);
  TempFolder folder;
  struct Case {
    float value;
    const char* found;
  };
  const float infinity = std::numeric_limits<float>::infinity();
  for (const size_t row : {0u, 255u, 256u, 1100u, 1183u}) {
    for (const auto& [value, found] :
         {Case{std::numeric_limits<float>::quiet_NaN(), "NaN"},
          Case{-infinity, "infinity"}, Case{-1e9f, "1e+09"}}) {
      MemorySource source = TinyTensors(options);
      MemorySource::Tensor& tensor = source.tensors.at("blk.0.ffn_up.weight");
      tensor.type = TensorType::kF32;
      std::mt19937 rng(1);
      tensor.bytes =
          RandomTensor(tensor.type, tensor.rows, tensor.cols, rng, -1, 1);
      ASSERT_EQ(tensor.rows, 1184u);
      std::memcpy(&tensor.bytes[4 * (row * tensor.cols + 5)], &value, 4);
      const std::string at = std::to_string(row);
      const auto load = [&](bool packed) {
        PackedReport report;
        if (packed) {
          LoadPackedWeights(
              config, source, pool, {},
              {.folder = folder.path(), .quantize = TensorType::kQ8_0}, report);
        } else {
          LoadWeights(config, source, pool, {}, TensorType::kQ8_0);
        }
      };
      for (const bool packed : {false, true}) {
        if (std::isfinite(value)) {
          EXPECT_TRUE(
              Says(MessageOf<InvalidArgument>([&] { load(packed); }),
                   {"quantize", "blk.0.ffn_up.weight", "1e+09",
                    StrCat("row ", at), "Q8_0"}));
        } else {
          EXPECT_TRUE(Says(MessageOf<CorruptFile>([&] { load(packed); }),
                           {"test tensors", "blk.0.ffn_up.weight", found,
                            StrCat("row ", at), "column 5", "finite"}));
        }
        EXPECT_TRUE(folder.Names().empty());
      }
    }
  }
}

}  // namespace
}  // namespace gkv
