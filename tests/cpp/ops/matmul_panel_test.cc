#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gemmakv/tensor_type.h"
#include "gtest/gtest.h"
#include "ops/every_target.h"
#include "ops/matmul_fixture.h"

// Products of many rows; that they are those of one row, for all shapes, is in
// matmul_conformance.h.

namespace gkv {
namespace {

class MatMulPanelTest : public EveryTargetTest {};

std::vector<TensorType> QuantizedTypes() {
  std::vector<TensorType> types;
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (UsesQuantizedActivations(info.type)) types.push_back(info.type);
  }
  return types;
}

// What sums of products in 16 bits hold is nearly all that they can.
TEST_F(MatMulPanelTest, SumsOfTheLargestProductsAreExact) {
  constexpr size_t kCols = 512, kRows = 24, kInputs = 21;
  for (const TensorType type : QuantizedTypes()) {
    TestInput input(kInputs, kCols, 3);
    for (size_t m = 0; m < kInputs; ++m) {
      for (size_t k = 0; k < kCols; ++k) {
        const size_t at = m % 7 == 0 ? 0 : k / m % 2;
        input.floats[m * kCols + k] = at == 0 ? 1.0f : -1.0f;
      }
    }
    input.Quantize();
    for (const uint8_t fill : {0x00, 0xFF, 0x80, 0x7F, 0x0F}) {
      TestWeights weights(type, kRows, kCols);
      std::fill(weights.source.begin(), weights.source.end(), fill);
      for (size_t at = 0; at < weights.source.size(); at += Info(type).bytes) {
        for (const size_t offset : HalfOffsets(type)) {
          weights.SetHalf(at + offset, 0x2C66);
        }
      }
      weights.Pack();
      OnEveryTarget([&] {
        std::vector<float> out(kInputs * kRows);
        MatMul(weights.View(), input.View(0, kInputs), 0, NumGroups(kRows),
               out.data(), kRows);
        for (size_t m = 0; m < kInputs; ++m) {
          double expected = 0, magnitude = 0;
          for (size_t k = 0; k < kCols; ++k) {
            const double term = weights.At(0, k) * input.At(type, m, k);
            expected += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(out[m * kRows], expected, 6e-7 * magnitude)
              << Info(type).name << " fill " << int{fill} << " m " << m;
        }
        gkv::ExpectSameBits(out, OneRowAtATime(weights, input),
                            std::string(Info(type).name));
      });
    }
  }
}

// Rows that fit a tile are read as they are.
TEST_F(MatMulPanelTest, ManyRowsAreTiles) {
  OnEveryTarget([&] {
    for (const TensorType type : QuantizedTypes()) {
      EXPECT_EQ(LayoutOfRows(type, 2, 512).tiles, 0u);
      const RowLayout layout = LayoutOfRows(type, 64, 512);
      EXPECT_GE(layout.tiles, 8u);
      EXPECT_GE(layout.bytes, 64u * 512);
      EXPECT_EQ(LayoutOfRows(type, 64, 1024).bytes, 2 * layout.bytes);
    }
  });
}

}  // namespace
}  // namespace gkv
