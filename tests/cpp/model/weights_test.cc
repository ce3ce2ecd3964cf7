#include "model/weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
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

TEST(WeightsTest, FingerprintIsOfContentNotOfThreads) {
  const TinyOptions options = MixedTypes();
  MemorySource source = TinyTensors(options);
  const Hash128 expected = Load(source, options).fingerprint;
  EXPECT_EQ(Load(source, options, 3).fingerprint, expected);
  // Any byte of any tensor counts.
  for (auto& [name, tensor] : source.tensors) {
    uint8_t& byte = tensor.bytes[tensor.bytes.size() / 2];
    byte ^= 1;
    EXPECT_NE(Load(source, options).fingerprint, expected) << name;
    byte ^= 1;
  }
  TinyOptions window = options;
  window.window = 25;
  EXPECT_NE(Load(source, window).fingerprint, expected);
}

TEST(WeightsTest, MissingAndMisshapenTensorsAreNamed) {
  const TinyOptions options;
  for (const auto& [name, tensor] : TinyTensors(options).tensors) {
    MemorySource source = TinyTensors(options);
    source.tensors.erase(name);
    try {
      Load(source, options);
      FAIL() << name << " was not missed";
    } catch (const CorruptFile& error) {
      EXPECT_NE(
          std::string(error.what()).find("tensor " + name + " is missing"),
          std::string::npos)
          << error.what();
    }
  }
  MemorySource source = TinyTensors(options);
  auto& tensor = source.tensors.at("blk.0.attn_q.weight");
  tensor.rows -= 1;
  try {
    Load(source, options);
    FAIL();
  } catch (const CorruptFile& error) {
    EXPECT_NE(std::string(error.what()).find("[127, 64], expected [128, 64]"),
              std::string::npos)
        << error.what();
  }
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

TEST(WeightsTest, EverySourceByteIsReleasedOnce) {
  // Counts what is given back.
  class Counting : public MemorySource {
   public:
    std::map<std::string, size_t> released;
    void Release(const TensorView& view, size_t begin, size_t end) override {
      EXPECT_EQ(released[view.name], begin);
      released[view.name] = end;
    }
  };
  const TinyOptions options = MixedTypes();
  Counting source;
  source.tensors = TinyTensors(options).tensors;
  Load(source, options, 2);
  for (const auto& [name, tensor] : source.tensors) {
    EXPECT_EQ(source.released[name], tensor.bytes.size()) << name;
  }
}

}  // namespace
}  // namespace gkv
