#ifndef GEMMAKV_TESTS_OPS_MATMUL_CONFORMANCE_H_
#define GEMMAKV_TESTS_OPS_MATMUL_CONFORMANCE_H_

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "gemmakv/tensor_type.h"
#include "gtest/gtest.h"
#include "ops/matmul.h"
#include "ops/matmul_fixture.h"
#include "ops/target.h"

// What every weight type must satisfy on every attainable target. The twin of
// matmul_<type>.cc instantiates the suite with std::integral_constant of its
// TensorType.

namespace gkv {

template <typename Type>
class MatMulConformance : public ::testing::Test {
 protected:
  static constexpr TensorType kType = Type::value;

  void TearDown() override { ForceTarget(""); }

  // Depths that a row of this type can have: one block up to several panels.
  static std::vector<size_t> Depths() {
    switch (Info(kType).values) {
      case 1:
        return {1, 7, 32, 255, 256, 600};
      case 32:
        return {32, 96, 640, 768, 800, 1632};
      default:
        return {256, 768, 1024, 1792};
    }
  }
  template <typename Fn>
  static void OnEveryTarget(const Fn& fn) {
    for (const std::string& target : AttainableTargets()) {
      SCOPED_TRACE(target);
      ForceTarget(target);
      fn(target);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
};

TYPED_TEST_SUITE_P(MatMulConformance);

// Against double precision on the same (quantized) activations.
TYPED_TEST_P(MatMulConformance, MatchesOracle) {
  constexpr TensorType kType = TypeParam::value;
  for (const size_t cols : this->Depths()) {
    for (const size_t rows : {1u, 16u, 43u}) {
      TestWeights weights(kType, rows, cols);
      weights.FillRandom(static_cast<uint32_t>(cols + rows));
      weights.Pack();
      TestInput input(5, cols, 7);
      this->OnEveryTarget([&](const std::string&) {
        const std::vector<float> out = OneRowAtATime(weights, input);
        for (size_t m = 0; m < input.rows; ++m) {
          for (size_t r = 0; r < rows; ++r) {
            double expected = 0.0, magnitude = 0.0;
            for (size_t k = 0; k < cols; ++k) {
              const double term = weights.At(r, k) * input.At(kType, m, k);
              expected += term;
              magnitude += std::abs(term);
            }
            // Measured: below 3e-7 of the sum of magnitudes everywhere.
            ASSERT_NEAR(out[m * rows + r], expected, 6e-7 * magnitude)
                << "rows " << rows << " cols " << cols << " m " << m << " r "
                << r;
          }
        }
      });
    }
  }
}

// However many rows share a call, and wherever groups are split.
TYPED_TEST_P(MatMulConformance, SameBitsForEveryShape) {
  constexpr TensorType kType = TypeParam::value;
  constexpr size_t kRows = 167;  // 11 groups: a full chunk and a partial one
  const size_t cols = this->Depths().back();
  TestWeights weights(kType, kRows, cols);
  weights.FillRandom(3);
  weights.Pack();
  TestInput input(131, cols, 5);
  this->OnEveryTarget([&](const std::string&) {
    const std::vector<float> expected = OneRowAtATime(weights, input);
    for (const size_t m : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 11u, 12u, 13u,
                           16u, 17u, 33u, 61u, 131u}) {
      const size_t split = m % NumGroups(kRows);
      std::vector<float> out(m * kRows, -1.0f);
      MatMul(weights.View(), input.View(0, m), 0, split, out.data(), kRows);
      MatMul(weights.View(), input.View(0, m), split, NumGroups(kRows),
             out.data(), kRows);
      ExpectSameBits(out, {expected.begin(), expected.begin() + m * kRows},
                     "rows " + std::to_string(m));
    }
  });
}

// With the rows laid out once for all calls, in any order of the tiles.
TYPED_TEST_P(MatMulConformance, SameBitsOfRowsLaidOut) {
  constexpr TensorType kType = TypeParam::value;
  constexpr size_t kRows = 43;
  const size_t cols = this->Depths().back();
  TestWeights weights(kType, kRows, cols);
  weights.FillRandom(5);
  weights.Pack();
  TestInput input(131, cols, 9);
  this->OnEveryTarget([&](const std::string&) {
    const std::vector<float> expected = OneRowAtATime(weights, input);
    EXPECT_EQ(LayoutOfRows(kType, 1, cols).tiles, 0u);
    for (const size_t m : {9u, 16u, 17u, 64u, 128u, 129u, 131u}) {
      MatMulInput view = input.View(0, m);
      const RowLayout layout = LayoutOfRows(kType, m, cols);
      ASSERT_EQ(layout.tiles != 0, UsesQuantizedActivations(kType));
      AlignedBuffer<uint8_t> laid_out(layout.bytes);
      for (size_t tile = layout.tiles; tile-- > 0;) {
        LayOutRows(kType, view, cols, tile, laid_out.data());
      }
      if (layout.tiles != 0) {
        view.laid_out = laid_out.data();
        view.quantized = {};  // not read any more
      }
      std::vector<float> out(m * kRows, -1.0f);
      MatMul(weights.View(), view, 0, NumGroups(kRows), out.data(), kRows);
      ExpectSameBits(out, {expected.begin(), expected.begin() + m * kRows},
                     "rows " + std::to_string(m));
    }
  });
}

// Rows too long for one pass: what has been summed goes on from where it was.
TYPED_TEST_P(MatMulConformance, SameBitsForLongRows) {
  constexpr TensorType kType = TypeParam::value;
  constexpr size_t kRows = 75, kInputs = 18;
  const size_t cols = 32768 + this->Depths().back();
  TestWeights weights(kType, kRows, cols);
  weights.FillRandom(41);
  weights.Pack();
  TestInput input(kInputs, cols, 43);
  this->OnEveryTarget([&](const std::string&) {
    const auto product = [&](size_t m) {
      std::vector<float> out(m * kRows, -1.0f);
      MatMul(weights.View(), input.View(0, m), 0, NumGroups(kRows), out.data(),
             kRows);
      return out;
    };
    const std::vector<float> expected = product(kInputs);
    for (size_t m = 1; m < kInputs; ++m) {
      ExpectSameBits(product(m),
                     {expected.begin(), expected.begin() + m * kRows},
                     "rows " + std::to_string(m));
    }
  });
}

TYPED_TEST_P(MatMulConformance, SameBitsOnTargetsOfOneNumericsId) {
  constexpr TensorType kType = TypeParam::value;
  const size_t cols = this->Depths().back();
  TestWeights weights(kType, 40, cols);
  weights.FillRandom(11);
  weights.Pack();
  TestInput input(8, cols, 13);
  std::vector<std::pair<uint32_t, std::vector<float>>> seen;
  this->OnEveryTarget([&](const std::string&) {
    const std::vector<float> out = OneRowAtATime(weights, input);
    for (const auto& [id, expected] : seen) {
      if (id == NumericsId()) ExpectSameBits(out, expected, "target");
    }
    seen.emplace_back(NumericsId(), out);
  });
}

// Only rows [16 g, 16 g + 16) of the matrix, in its own columns of `out`.
TYPED_TEST_P(MatMulConformance, WritesOnlyItsOutputs) {
  constexpr TensorType kType = TypeParam::value;
  const size_t cols = this->Depths()[2], stride = 60;
  TestWeights weights(kType, 43, cols);
  weights.FillRandom(17);
  weights.Pack();
  TestInput input(3, cols, 19);
  this->OnEveryTarget([&](const std::string&) {
    std::vector<float> out(3 * stride, 12345.0f);
    MatMul(weights.View(), input.View(0, 3), 1, 3, out.data(), stride);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t r = i % stride;
      ASSERT_EQ(out[i] != 12345.0f, r >= 16 && r < 43) << i;
    }
    MatMul(weights.View(), input.View(0, 3), 2, 2, out.data(), stride);
    MatMul(weights.View(), input.View(0, 0), 0, 3, out.data(), stride);
    ASSERT_EQ(out[0], 12345.0f);
  });
}

// Exactly what the file says.
TYPED_TEST_P(MatMulConformance, UnpackRowIsExact) {
  constexpr TensorType kType = TypeParam::value;
  for (const size_t cols : this->Depths()) {
    TestWeights weights(kType, 37, cols);
    weights.FillRandom(static_cast<uint32_t>(cols));
    weights.Pack();
    for (size_t r = 0; r < weights.rows; ++r) {
      std::vector<float> out(cols), expected(cols);
      UnpackRow(weights.View(), r, out.data());
      for (size_t k = 0; k < cols; ++k) expected[k] = weights.At(r, k);
      ExpectSameBits(out, expected, "row " + std::to_string(r));
    }
  }
}

// Never below what they are, and hardly above.
TYPED_TEST_P(MatMulConformance, SquaredNormsAreBounds) {
  constexpr TensorType kType = TypeParam::value;
  for (const size_t cols : this->Depths()) {
    TestWeights weights(kType, 37, cols);
    weights.FillRandom(static_cast<uint32_t>(47 + cols));
    weights.Pack();
    this->OnEveryTarget([&](const std::string&) {
      for (size_t group = 0; group < NumGroups(weights.rows); ++group) {
        float found[kRowGroup];
        SquaredNorms(weights.View(), group, found);
        for (size_t i = 0; i < kRowGroup; ++i) {
          const size_t row = group * kRowGroup + i;
          double sum = 0;
          for (size_t k = 0; row < weights.rows && k < cols; ++k) {
            sum += static_cast<double>(weights.At(row, k)) *
                   weights.At(row, k);
          }
          ASSERT_GE(found[i], sum) << "cols " << cols << " row " << row;
          ASSERT_LE(found[i], sum * (1 + 2e-4))
              << "cols " << cols << " row " << row;
        }
      }
    });
  }
}

// Rows that the last group has but the matrix has not are zeros.
TYPED_TEST_P(MatMulConformance, AbsentRowsAreZero) {
  constexpr TensorType kType = TypeParam::value;
  const size_t cols = this->Depths()[1];
  TestWeights weights(kType, 3, cols);
  weights.FillRandom(23);
  weights.Pack();
  PackedView all = weights.View();
  all.rows = kRowGroup;
  for (size_t r = 3; r < kRowGroup; ++r) {
    std::vector<float> out(cols, 1.0f);
    UnpackRow(all, r, out.data());
    for (const float x : out) ASSERT_EQ(x, 0.0f);
  }
}

// All bits of the weights clear or set, activations at +-127, and scales from
// the smallest subnormal to the largest finite number.
TYPED_TEST_P(MatMulConformance, ExtremeValues) {
  constexpr TensorType kType = TypeParam::value;
  const size_t cols = this->Depths()[1];
  TestInput input(4, cols, 29);
  for (size_t k = 0; k < cols; ++k) {
    input.floats[k] = 1.0f;
    input.floats[cols + k] = -1.0f;
    input.floats[2 * cols + k] = k % 2 == 0 ? 1.0f : -1.0f;
    input.floats[3 * cols + k] = 0.0f;
  }
  input.Quantize();
  for (const uint16_t scale : {0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x0000}) {
    for (const uint8_t fill : {0x00, 0xFF, 0x80, 0x7F}) {
      TestWeights weights(kType, 16, cols);
      const TensorTypeInfo& info = Info(kType);
      std::fill(weights.source.begin(), weights.source.end(), fill);
      for (size_t at = 0; at < weights.source.size(); at += info.bytes) {
        for (const size_t offset : HalfOffsets(kType)) {
          weights.SetHalf(at + offset, scale);
        }
        // Byte patterns that would be NaN or infinite as F32 and BF16.
        if (kType == TensorType::kF32) weights.source[at + 3] &= 0x8F;
        if (kType == TensorType::kBF16) weights.source[at + 1] &= 0x8F;
      }
      weights.Pack();
      this->OnEveryTarget([&](const std::string&) {
        const std::vector<float> out = OneRowAtATime(weights, input);
        for (size_t m = 0; m < input.rows; ++m) {
          double expected = 0.0, magnitude = 0.0;
          for (size_t k = 0; k < cols; ++k) {
            const double term = weights.At(0, k) * input.At(kType, m, k);
            expected += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(out[m * 16], expected, 1e-6 * magnitude + 1e-42)
              << "scale " << scale << " fill " << int{fill} << " m " << m;
        }
      });
    }
  }
}

TYPED_TEST_P(MatMulConformance, NanAndInfinityStayVisible) {
  constexpr TensorType kType = TypeParam::value;
  const size_t cols = this->Depths()[2];
  TestWeights weights(kType, 16, cols);
  weights.FillRandom(31);
  weights.Pack();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    TestInput input(3, cols, 37);
    input.floats[cols + cols / 2] = bad;  // row 1
    input.Quantize();
    this->OnEveryTarget([&](const std::string&) {
      std::vector<float> out(3 * 16);
      MatMul(weights.View(), input.View(0, 3), 0, 1, out.data(), 16);
      for (size_t r = 0; r < 16; ++r) {
        ASSERT_TRUE(std::isfinite(out[r]));
        ASSERT_FALSE(std::isfinite(out[16 + r]));
        ASSERT_TRUE(std::isfinite(out[32 + r]));
      }
    });
  }
}

REGISTER_TYPED_TEST_SUITE_P(MatMulConformance, MatchesOracle,
                            SameBitsForEveryShape, SameBitsOfRowsLaidOut,
                            SameBitsForLongRows,
                            SameBitsOnTargetsOfOneNumericsId,
                            WritesOnlyItsOutputs, UnpackRowIsExact,
                            SquaredNormsAreBounds,
                            AbsentRowsAreZero, ExtremeValues,
                            NanAndInfinityStayVisible);

}  // namespace gkv

#endif  // GEMMAKV_TESTS_OPS_MATMUL_CONFORMANCE_H_
