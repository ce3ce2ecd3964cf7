#include "ops/quantize_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/float16.h"
#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr TensorType kFloatTypes[] = {TensorType::kF32, TensorType::kF16,
                                      TensorType::kBF16};
constexpr TensorType kBlockTypes[] = {TensorType::kQ8_0, TensorType::kQ5_0,
                                      TensorType::kQ4_0};

Bytes Stored(TensorType type, const std::vector<float>& values) {
  Bytes bytes(values.size() * Info(type).bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == TensorType::kF32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
      continue;
    }
    const uint16_t half = type == TensorType::kF16
                              ? Float16FromFloat32(values[i])
                              : BFloat16FromFloat32(values[i]);
    std::memcpy(&bytes[2 * i], &half, 2);
  }
  return bytes;
}

std::vector<float> Values(TensorType type, const Bytes& bytes) {
  std::vector<float> values(bytes.size() / Info(type).bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    if (type == TensorType::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      std::memcpy(&half, &bytes[2 * i], 2);
      values[i] = type == TensorType::kF16 ? Float32FromFloat16(half)
                                           : Float32FromBFloat16(half);
    }
  }
  return values;
}

// The definition, one value at a time.
Bytes Expected(const std::vector<float>& x, TensorType to) {
  Bytes out(RowBytes(to, x.size()), 0);
  if (to == TensorType::kBF16) return Stored(to, x);
  for (size_t b = 0; b < x.size() / 32; ++b) {
    const float* block = &x[32 * b];
    uint8_t* bytes = &out[b * Info(to).bytes];
    float largest = block[0];
    for (size_t i = 1; i < 32; ++i) {
      if (std::abs(block[i]) > std::abs(largest)) largest = block[i];
    }
    const int levels = to == TensorType::kQ4_0 ? 16 : 32;
    const float d = to == TensorType::kQ8_0
                        ? std::abs(largest) / 127
                        : largest / static_cast<float>(-levels / 2);
    const float inverse = d == 0 || std::isinf(1 / d) ? 0 : 1 / d;
    const uint16_t half = Float16FromFloat32(d);
    std::memcpy(bytes, &half, 2);
    for (size_t i = 0; i < 32; ++i) {
      const float scaled = block[i] * inverse;
      if (to == TensorType::kQ8_0) {
        bytes[2 + i] = static_cast<uint8_t>(std::lround(scaled));
        continue;
      }
      const float shifted = scaled + (static_cast<float>(levels / 2) + 0.5f);
      const int q = std::min(levels - 1, static_cast<int>(std::floor(shifted)));
      const size_t nibbles = to == TensorType::kQ4_0 ? 2 : 6;
      bytes[nibbles + i % 16] |=
          static_cast<uint8_t>((q & 15) << (i < 16 ? 0 : 4));
      if (q >= 16 && to == TensorType::kQ5_0) {
        bytes[2 + i / 8] |= static_cast<uint8_t>(1 << i % 8);
      }
    }
  }
  return out;
}

class QuantizeWeightsTest : public EveryTargetTest {
 protected:
  // Converts from an unaligned address, to one.
  Bytes Quantize(TensorType from, const Bytes& source, TensorType to,
                 bool* sound) {
    const size_t count = source.size() / Info(from).bytes;
    Bytes in(source.size() + 1), out(RowBytes(to, count) + 2, 0xA5);
    std::memcpy(&in[1], source.data(), source.size());
    *sound = QuantizeWeights(from, &in[1], count, to, &out[1]);
    EXPECT_EQ(out.front(), 0xA5);
    EXPECT_EQ(out.back(), 0xA5);
    return Bytes(out.begin() + 1, out.end() - 1);
  }
  void ExpectAll(const std::vector<float>& wanted, TensorType from,
                 TensorType to) {
    const Bytes source = Stored(from, wanted);
    const Bytes expected = Expected(Values(from, source), to);
    OnEveryTarget([&] {
      bool sound = false;
      const Bytes found = Quantize(from, source, to, &sound);
      ASSERT_TRUE(sound);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i], expected[i])
            << Info(from).name << " to " << Info(to).name << ", byte " << i;
      }
    });
  }
  void ExpectRefused(const Bytes& source, TensorType from, TensorType to) {
    OnEveryTarget([&] {
      bool sound = true;
      Quantize(from, source, to, &sound);
      EXPECT_FALSE(sound) << Info(from).name << " to " << Info(to).name;
    });
  }
};

std::vector<float> Random(size_t count, uint32_t seed, float exponents) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  float scale = 1;
  for (size_t i = 0; i < count; ++i) {
    if (i % 32 == 0) scale = std::exp2(-std::abs(normal(rng)) * exponents);
    x[i] = normal(rng) * scale;
  }
  return x;
}

TEST_F(QuantizeWeightsTest, MatchesTheDefinition) {
  for (const TensorType from : kFloatTypes) {
    for (const TensorType to : kBlockTypes) {
      for (const size_t count : {32u, 64u, 1152u}) {
        ExpectAll(Random(count, 1, 0), from, to);
      }
      ExpectAll(Random(64 * 32, 2, 4), from, to);
    }
    if (from == TensorType::kBF16) continue;
    for (size_t count = 1; count < 70; ++count) {
      ExpectAll(Random(count, 3, 4), from, TensorType::kBF16);
    }
  }
  // Scales that are subnormal or zero as binary16, or in single precision.
  for (const TensorType to : kBlockTypes) {
    ExpectAll(Random(64 * 32, 4, 30), TensorType::kBF16, to);
    std::vector<float> tiny = Random(32 * 32, 5, 0);
    for (size_t i = 0; i < tiny.size(); ++i) {
      tiny[i] = std::ldexp(tiny[i], -115 - static_cast<int>(i / 32));
    }
    ExpectAll(tiny, TensorType::kF32, to);
  }
}

// Halves, and values next to them, at both signs.
TEST_F(QuantizeWeightsTest, Ties) {
  std::vector<float> x;
  for (const float sign : {1.0f, -1.0f}) {
    for (int base = 0; base < 127; base += 5) {
      std::vector<float> block(32, 0.0f);
      block[7] = 127.0f;  // of Q8_0 the scale is 1
      for (int i = 0; i < 5; ++i) {
        const float half = sign * (static_cast<float>(base + i) + 0.5f);
        block[8 + i] = half;
        block[16 + i] = std::nextafter(half, 0.0f);
        block[24 + i] = std::nextafter(half, half * 2);
      }
      for (float& value : block) value = std::clamp(value, -127.0f, 127.0f);
      x.insert(x.end(), block.begin(), block.end());
    }
    for (const float top : {8.0f, -8.0f, 16.0f, -16.0f}) {
      std::vector<float> block(32);
      for (int i = 0; i < 32; ++i) {
        block[i] =
            std::clamp(sign * (static_cast<float>(i) - 15.5f), -7.5f, 7.5f);
      }
      block[31] = top;
      x.insert(x.end(), block.begin(), block.end());
    }
  }
  for (const TensorType from : kFloatTypes) {
    for (const TensorType to : kBlockTypes) ExpectAll(x, from, to);
  }
}

// The largest magnitude at either sign, first and last; zeros of either sign.
TEST_F(QuantizeWeightsTest, TheFirstOfTheLargestDecides) {
  std::vector<float> x;
  for (size_t first = 0; first < 32; ++first) {
    for (size_t second = 0; second < 32; ++second) {
      for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> block = Random(32, 6, 3);
        for (float& value : block) value = std::clamp(value, -0.9f, 0.9f);
        block[first] = sign;
        if (second != first) block[second] = -sign;
        x.insert(x.end(), block.begin(), block.end());
      }
    }
  }
  for (const float first : {0.0f, -0.0f}) {
    std::vector<float> block(32, -first);
    block[0] = first;
    x.insert(x.end(), block.begin(), block.end());
  }
  for (const TensorType to : kBlockTypes) {
    ExpectAll(x, TensorType::kF32, to);
  }
}

TEST_F(QuantizeWeightsTest, EveryFloat16) {
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7C00) == 0x7C00) continue;
    x.push_back(Float32FromFloat16(static_cast<uint16_t>(bits)));
  }
  for (const TensorType to : kBlockTypes) {
    ExpectAll(x, TensorType::kF16, to);
  }
  ExpectAll(x, TensorType::kF16, TensorType::kBF16);
}

TEST_F(QuantizeWeightsTest, NanAndInfinityAreRefusedWhereverTheyAre) {
  for (const TensorType from : kFloatTypes) {
    for (const uint32_t bad : {0x7F800000u, 0xFF800000u, 0x7FC00000u,
                               0xFFC00000u, 0x7FFFFFFFu, 0x7F8001FFu}) {
      for (size_t at = 0; at < 33; ++at) {
        Bytes source = Stored(from, Random(64, 7, 0));
        uint16_t half = static_cast<uint16_t>(bad >> 16);
        if (from == TensorType::kF16) {
          half = static_cast<uint16_t>((half & 0x80FF) | 0x7C00);
        }
        if (from == TensorType::kF32) {
          std::memcpy(&source[4 * at], &bad, 4);
        } else {
          std::memcpy(&source[2 * at], &half, 2);
        }
        for (const TensorType to : kBlockTypes) ExpectRefused(source, from, to);
        if (from == TensorType::kBF16) continue;
        ExpectRefused(source, from, TensorType::kBF16);
      }
    }
  }
}

TEST_F(QuantizeWeightsTest, ScalesThatOverflowAreRefused) {
  const auto limit_of = [](TensorType to) {
    return to == TensorType::kQ8_0 ? 127.0f
                                   : (to == TensorType::kQ5_0 ? 16.0f : 8.0f);
  };
  for (const TensorType to : kBlockTypes) {
    std::vector<float> x = Random(64, 8, 0);
    const float limit = limit_of(to) * 65520.0f;
    for (const float sign : {1.0f, -1.0f}) {
      x[37] = sign * limit;
      ExpectRefused(Stored(TensorType::kF32, x), TensorType::kF32, to);
      x[37] = sign * limit * 0.9999f;
      ExpectAll(x, TensorType::kF32, to);
    }
  }
  std::vector<float> x = Random(35, 9, 0);
  for (const size_t at : {0u, 16u, 34u}) {
    const float before = x[at];
    x[at] = -0x1.FFp127f;  // rounds to infinity
    ExpectRefused(Stored(TensorType::kF32, x), TensorType::kF32,
                  TensorType::kBF16);
    x[at] = -0x1.FEFFFEp127f;
    ExpectAll(x, TensorType::kF32, TensorType::kBF16);
    x[at] = before;
  }
}

}  // namespace
}  // namespace gkv
