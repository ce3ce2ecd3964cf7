#ifndef GEMMAKV_TESTS_OPS_MATMUL_FIXTURE_H_
#define GEMMAKV_TESTS_OPS_MATMUL_FIXTURE_H_

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "gemmakv/tensor_type.h"
#include "gtest/gtest.h"
#include "ops/matmul.h"
#include "ops/matmul_oracle.h"
#include "ops/quantize.h"

// Weights and activations for tests of matrix products.

namespace gkv {

// `size` bytes aligned as kernels require, with nothing behind them: reading
// past the end is an error that the address sanitizer sees.
class ExactBytes {
 public:
  explicit ExactBytes(size_t size) : size_(size) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, size) != 0) throw std::bad_alloc();
    data_.reset(static_cast<uint8_t*>(p));
  }
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_;
};

// Offsets of the fp16 numbers in a block; the rest may be any bits.
inline std::vector<size_t> HalfOffsets(TensorType type) {
  switch (type) {
    case TensorType::kF32:
    case TensorType::kBF16:
      return {};
    case TensorType::kQ4_K:
    case TensorType::kQ5_K:
      return {0, 2};
    case TensorType::kQ6_K:
      return {208};
    default:
      return {0};
  }
}

// A matrix in the file's format, and packed.
struct TestWeights {
  TensorType type;
  size_t rows, cols;
  std::vector<uint8_t> source;
  ExactBytes packed;

  TestWeights(TensorType type, size_t rows, size_t cols)
      : type(type),
        rows(rows),
        cols(cols),
        source(rows * RowBytes(type, cols)),
        packed(NumGroups(rows) * GroupBytes(type, cols)) {}

  // Any bits, with fp16 scales of either sign between 2^-12 and 2^-8.
  void FillRandom(uint32_t seed) {
    std::mt19937 rng(seed);
    const TensorTypeInfo& info = Info(type);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(rng());
    for (size_t at = 0; at < source.size(); at += info.bytes) {
      for (const size_t offset : HalfOffsets(type)) {
        const uint32_t exponent = 3 + rng() % 4;
        SetHalf(at + offset,
                static_cast<uint16_t>((rng() & 0x83FF) | exponent << 10));
      }
      if (type == TensorType::kF32 || type == TensorType::kBF16) {
        const float x = static_cast<float>(rng() % 2001) / 1000.0f - 1.0f;
        const uint32_t bits = std::bit_cast<uint32_t>(x);
        if (info.bytes == 4) std::memcpy(&source[at], &bits, 4);
        if (info.bytes == 2) SetHalf(at, static_cast<uint16_t>(bits >> 16));
      }
    }
  }
  void SetHalf(size_t at, uint16_t bits) {
    source[at] = static_cast<uint8_t>(bits);
    source[at + 1] = static_cast<uint8_t>(bits >> 8);
  }
  void Pack() {
    for (size_t g = 0; g < NumGroups(rows); ++g) {
      const size_t first = g * kRowGroup;
      PackGroup(type, source.data() + first * RowBytes(type, cols),
                std::min(kRowGroup, rows - first), cols,
                packed.data() + g * GroupBytes(type, cols));
    }
  }
  PackedView View() const { return {type, rows, cols, packed.data()}; }
  float At(size_t row, size_t col) const {
    return WeightAt(type, source.data() + row * RowBytes(type, cols), col);
  }
};

// Rows of activations in both forms, without a byte to spare.
struct TestInput {
  size_t rows, cols;
  std::vector<float> floats;
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  TestInput(size_t rows, size_t cols, uint32_t seed)
      : rows(rows),
        cols(cols),
        floats(rows * cols),
        values(rows * cols),
        scales(rows * (cols / kQuantBlock)),
        sums(rows * (cols / kQuantBlock)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (float& x : floats) x = normal(rng);
    Quantize();
  }
  void Quantize() {
    if (cols % kQuantBlock != 0) return;
    QuantizeRows(floats.data(), cols, rows, cols,
                 {values.data(), scales.data(), sums.data()});
  }
  // The first `count` rows from row `first` on.
  MatMulInput View(size_t first, size_t count) {
    const size_t blocks = cols / kQuantBlock;
    return {floats.data() + first * cols,
            cols,
            {values.data() + first * cols, scales.data() + first * blocks,
             sums.data() + first * blocks},
            count};
  }
  // The activation that the kernels of `type` read.
  double At(TensorType type, size_t row, size_t col) const {
    if (!UsesQuantizedActivations(type)) return floats[row * cols + col];
    return static_cast<double>(values[row * cols + col]) *
           scales[(row * cols + col) / kQuantBlock];
  }
};

// With a scratch of this call's own, not a byte of which is spare, full of what
// is no number.
inline void MatMul(const PackedView& weights, const MatMulInput& input,
                   size_t group_begin, size_t group_end, float* out,
                   size_t out_stride) {
  const ExactBytes scratch(kMatMulScratchBytes);
  std::memset(scratch.data(), 0xFF, scratch.size());
  MatMul(weights, input, group_begin, group_end, scratch.data(), out,
         out_stride);
}

// [input rows, weights rows], row by row in one call each: the reference for
// bit equality.
inline std::vector<float> OneRowAtATime(const TestWeights& weights,
                                        TestInput& input) {
  std::vector<float> out(input.rows * weights.rows);
  for (size_t m = 0; m < input.rows; ++m) {
    MatMul(weights.View(), input.View(m, 1), 0, NumGroups(weights.rows),
           &out[m * weights.rows], weights.rows);
  }
  return out;
}

inline std::string Bits(float x) {
  return std::to_string(x) + "/" + std::to_string(std::bit_cast<uint32_t>(x));
}

inline void ExpectSameBits(const std::vector<float>& a,
                           const std::vector<float>& b,
                           const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i]))
        << what << " at " << i << ": " << Bits(a[i]) << " " << Bits(b[i]);
  }
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_OPS_MATMUL_FIXTURE_H_
