#include "ops/matmul.h"

#include <cstdint>
#include <string>
#include <vector>

#include "base/hash.h"
#include "gemmakv/tensor_type.h"
#include "gtest/gtest.h"
#include "ops/matmul_fixture.h"

// The dispatch over weight types; each type's arithmetic is tested in its own
// twin.

namespace gkv {
namespace {

TEST(MatMulTest, GroupBytesAreTheFilesBitsPerWeight) {
  EXPECT_EQ(GroupBytes(TensorType::kQ8_0, 640), 16u * 20 * 34);
  EXPECT_EQ(GroupBytes(TensorType::kQ6_K, 512), 16u * 2 * 210);
  EXPECT_EQ(GroupBytes(TensorType::kBF16, 3), 16u * 3 * 2);
  EXPECT_EQ(NumGroups(0), 0u);
  EXPECT_EQ(NumGroups(16), 1u);
  EXPECT_EQ(NumGroups(17), 2u);
}

TEST(MatMulTest, OnlyFloatTypesReadFloats) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    const bool is_float = info.values == 1;
    EXPECT_EQ(UsesQuantizedActivations(info.type), !is_float) << info.name;
  }
}

// Every type reaches its own kernels: packing and unpacking a row of each must
// give back that type's values.
TEST(MatMulTest, EveryTypeHasItsOwnKernels) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    // Whole units of blocks, and a shorter one at the end.
    for (const size_t cols : {size_t{256}, 2 * 768 + info.values}) {
      TestWeights weights(info.type, 20, cols);
      weights.FillRandom(1);
      weights.Pack();
      std::vector<float> out(cols);
      UnpackRow(weights.View(), 17, out.data());
      for (size_t k = 0; k < cols; ++k) {
        ASSERT_EQ(out[k], weights.At(17, k)) << info.name << " " << k;
      }
    }
  }
}

// Files of packed weights outlive a build: what PackGroup writes may change
// only together with kPackedLayoutVersion.
TEST(MatMulTest, PackedLayoutIsThatOfItsVersion) {
  Hasher hasher;
  for (const TensorTypeInfo& info : kTensorTypes) {
    constexpr size_t kRows = 13, kCols = 512;
    std::vector<uint8_t> source(kRows * RowBytes(info.type, kCols));
    for (size_t i = 0; i < source.size(); ++i) {
      source[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    }
    std::vector<uint8_t> group(GroupBytes(info.type, kCols));
    PackGroup(info.type, source.data(), kRows, kCols, group.data());
    hasher.Update(group);
  }
  EXPECT_EQ(kPackedLayoutVersion, 2u);
  EXPECT_EQ(hasher.Finish().Hex(), "c4c88cff65c7dac57e5690c4cc009541")
      << "count kPackedLayoutVersion up and put the new hash here";
}

// The pointer that a type does not read may be null.
TEST(MatMulTest, ReadsOnlyTheFormOfActivationsItNeeds) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    TestWeights weights(info.type, 16, 256);
    weights.FillRandom(2);
    weights.Pack();
    TestInput input(2, 256, 3);
    MatMulInput view = input.View(0, 2);
    std::vector<float> expected(32), out(32);
    MatMul(weights.View(), view, 0, 1, expected.data(), 16);
    if (UsesQuantizedActivations(info.type)) {
      view.floats = nullptr;
    } else {
      view.quantized = {};
    }
    MatMul(weights.View(), view, 0, 1, out.data(), 16);
    ExpectSameBits(out, expected, std::string(info.name));
  }
}

}  // namespace
}  // namespace gkv
