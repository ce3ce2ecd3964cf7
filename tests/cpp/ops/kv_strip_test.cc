#include "ops/kv_strip.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/float16.h"
#include "gtest/gtest.h"

namespace gkv {
namespace {

constexpr KvDtype kDtypes[] = {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8};
constexpr uint8_t kUntouched = 0xA5;

class Strip {
 public:
  Strip(KvDtype dtype, size_t tokens, size_t head_dim)
      : dtype_(dtype),
        tokens_(tokens),
        head_dim_(head_dim),
        bytes_(KvStripBytes(dtype, tokens, head_dim)) {
    std::memset(bytes_.data(), kUntouched, bytes_.size());
  }
  void StoreKey(const std::vector<float>& x, size_t index) {
    gkv::StoreKey(dtype_, x.data(), head_dim_, index, tokens_, bytes_.data());
  }
  void StoreValue(const std::vector<float>& x, size_t index) {
    gkv::StoreValue(dtype_, x.data(), head_dim_, index, tokens_, bytes_.data());
  }
  std::vector<float> Key(size_t index) const {
    std::vector<float> out(head_dim_);
    LoadKey(dtype_, bytes_.data(), head_dim_, index, tokens_, out.data());
    return out;
  }
  std::vector<float> Value(size_t index) const {
    std::vector<float> out(head_dim_);
    LoadValue(dtype_, bytes_.data(), head_dim_, index, tokens_, out.data());
    return out;
  }
  // The number at element `at` of the strip, as the header lays it out.
  float Element(size_t at) const {
    switch (dtype_) {
      case KvDtype::kF32:
        return Read<float>(at);
      case KvDtype::kBF16:
        return Float32FromBFloat16(Read<uint16_t>(at));
      default:
        return static_cast<float>(Read<int8_t>(at));
    }
  }
  float Scale(size_t at) const {
    float scale;
    std::memcpy(&scale, bytes_.data() + tokens_ * head_dim_ + at * 4, 4);
    return scale;
  }
  const uint8_t* data() const { return bytes_.data(); }
  uint8_t* data() { return bytes_.data(); }
  std::vector<uint8_t> Bytes() const {
    return {bytes_.data(), bytes_.data() + bytes_.size()};
  }

 private:
  template <typename T>
  T Read(size_t at) const {
    T value;
    std::memcpy(&value, bytes_.data() + at * sizeof(T), sizeof(T));
    return value;
  }
  KvDtype dtype_;
  size_t tokens_, head_dim_;
  AlignedBuffer<uint8_t> bytes_;
};

std::vector<float> Normal(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

// What is stored of x, by definition.
std::vector<float> Rounded(KvDtype dtype, const std::vector<float>& x) {
  std::vector<float> out = x;
  for (size_t i = 0; i < x.size(); ++i) {
    if (dtype == KvDtype::kBF16) {
      out[i] = Float32FromBFloat16(BFloat16FromFloat32(x[i]));
    } else if (dtype == KvDtype::kInt8) {
      float max = 0;
      for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32; ++j) {
        max = std::max(max, std::abs(x[j]));
      }
      out[i] = std::nearbyint(x[i] * (127.0f / max)) * (max / 127.0f);
    }
  }
  return out;
}

// Calls fn(dtype, tokens, head_dim).
template <typename Fn>
void ForEachShape(const Fn& fn) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t tokens : {16u, 32u, 128u}) {
      for (const size_t head_dim : {32u, 64u, 256u}) {
        SCOPED_TRACE(testing::Message()
                     << "dtype " << static_cast<int>(dtype) << ", tokens "
                     << tokens << ", head_dim " << head_dim);
        fn(dtype, tokens, head_dim);
      }
    }
  }
}

TEST(KvStripTest, Sizes) {
  EXPECT_EQ(KvStripBytes(KvDtype::kF32, 16, 256), 16u * 256 * 4);
  EXPECT_EQ(KvStripBytes(KvDtype::kBF16, 128, 64), 128u * 64 * 2);
  EXPECT_EQ(KvStripBytes(KvDtype::kInt8, 32, 256), 32u * (256 + 8 * 4));
}

TEST(KvStripTest, KeysLieAsTheHeaderSays) {
  ForEachShape([](KvDtype dtype, size_t tokens, size_t head_dim) {
    Strip strip(dtype, tokens, head_dim);
    for (size_t t = 0; t < tokens; ++t) {
      strip.StoreKey(Normal(head_dim, static_cast<uint32_t>(t)), t);
    }
    for (size_t t = 0; t < tokens; ++t) {
      const std::vector<float> expected =
          Rounded(dtype, Normal(head_dim, static_cast<uint32_t>(t)));
      for (size_t d = 0; d < head_dim; ++d) {
        float stored = strip.Element((t / 16 * head_dim + d) * 16 + t % 16);
        if (dtype == KvDtype::kInt8) {
          stored *=
              strip.Scale((t / 16 * (head_dim / 32) + d / 32) * 16 + t % 16);
        }
        ASSERT_EQ(stored, expected[d]) << "token " << t << ", dim " << d;
      }
      ASSERT_EQ(strip.Key(t), expected) << t;
    }
  });
}

TEST(KvStripTest, ValuesLieAsTheHeaderSays) {
  ForEachShape([](KvDtype dtype, size_t tokens, size_t head_dim) {
    Strip strip(dtype, tokens, head_dim);
    for (size_t t = 0; t < tokens; ++t) {
      strip.StoreValue(Normal(head_dim, static_cast<uint32_t>(t)), t);
    }
    for (size_t t = 0; t < tokens; ++t) {
      const std::vector<float> expected =
          Rounded(dtype, Normal(head_dim, static_cast<uint32_t>(t)));
      for (size_t d = 0; d < head_dim; ++d) {
        float stored = strip.Element(t * head_dim + d);
        if (dtype == KvDtype::kInt8) {
          stored *= strip.Scale(t * (head_dim / 32) + d / 32);
        }
        ASSERT_EQ(stored, expected[d]) << "token " << t << ", dim " << d;
      }
      ASSERT_EQ(strip.Value(t), expected) << t;
    }
  });
}

// Storing writes the token's own bytes and no others: as many as its share of
// the strip.
TEST(KvStripTest, StoringTouchesOneTokenOnly) {
  ForEachShape([](KvDtype dtype, size_t tokens, size_t head_dim) {
    // A byte that is written differs from kUntouched in one of two fills.
    const std::vector<float> x = Normal(head_dim, 1);
    for (const bool key : {true, false}) {
      Strip strip(dtype, tokens, head_dim), inverse(dtype, tokens, head_dim);
      std::memset(inverse.data(), 0x5A, inverse.Bytes().size());
      for (Strip* s : {&strip, &inverse}) {
        if (key) {
          s->StoreKey(x, tokens - 3);
        } else {
          s->StoreValue(x, tokens - 3);
        }
      }
      const std::vector<uint8_t> a = strip.Bytes(), b = inverse.Bytes();
      size_t written = 0;
      for (size_t i = 0; i < a.size(); ++i) written += a[i] == b[i];
      EXPECT_EQ(written, a.size() / tokens);
    }
  });
}

TEST(KvStripTest, BF16RoundsToNearestEvenAndKeepsSpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x(32, 0.0f);
  x[0] = std::bit_cast<float>(0x3F808000u);  // a tie, even below
  x[1] = std::bit_cast<float>(0x3F818000u);  // a tie, even above
  x[2] = std::bit_cast<float>(0x3F808001u);
  x[3] = -infinity;
  x[4] = std::numeric_limits<float>::quiet_NaN();
  x[5] = std::bit_cast<float>(0x7F800001u);  // NaN with low bits only
  x[6] = std::numeric_limits<float>::max();
  x[7] = -0.0f;
  Strip strip(KvDtype::kBF16, 16, 32);
  strip.StoreKey(x, 5);
  const std::vector<float> y = strip.Key(5);
  EXPECT_EQ(y[0], std::bit_cast<float>(0x3F800000u));
  EXPECT_EQ(y[1], std::bit_cast<float>(0x3F820000u));
  EXPECT_EQ(y[2], std::bit_cast<float>(0x3F810000u));
  EXPECT_EQ(y[3], -infinity);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(y[6], infinity);
  EXPECT_TRUE(std::signbit(y[7]));
}

TEST(KvStripTest, Int8KeepsItsMaximumAndMarksWhatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x(96, 0.0f);
  for (size_t i = 0; i < 32; ++i) x[i] = static_cast<float>(i) - 15.5f;
  for (size_t i = 64; i < 96; ++i) x[i] = 1e-40f;
  Strip keys(KvDtype::kInt8, 16, 96), values(KvDtype::kInt8, 16, 96);
  for (const float bad : {infinity, -infinity, nan}) {
    for (size_t i = 32; i < 64; ++i) x[i] = i == 40 ? bad : 1.0f;
    keys.StoreKey(x, 9);
    values.StoreValue(x, 9);
    for (const std::vector<float>& y : {keys.Key(9), values.Value(9)}) {
      EXPECT_FLOAT_EQ(y[0], -15.5f);
      for (size_t i = 0; i < 32; ++i) {
        EXPECT_NEAR(y[i], x[i], 15.5 / 127 / 2 * 1.00001);
      }
      for (size_t i = 32; i < 64; ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
      for (size_t i = 64; i < 96; ++i) EXPECT_EQ(y[i], 0.0f) << i;
    }
  }
}

TEST(KvStripTest, CopiesTheFirstTokensBetweenStripsOfAnySize) {
  constexpr size_t kHeadDim = 64;
  for (const KvDtype dtype : kDtypes) {
    Strip from(dtype, 64, kHeadDim), from_values(dtype, 64, kHeadDim);
    for (size_t t = 0; t < 64; ++t) {
      const std::vector<float> x = Normal(kHeadDim, static_cast<uint32_t>(t));
      from.StoreKey(x, t);
      from_values.StoreValue(x, t);
    }
    for (const size_t to_tokens : {32u, 64u, 128u}) {
      for (const size_t count : {0u, 1u, 15u, 16u, 17u, 31u, 32u}) {
        SCOPED_TRACE(testing::Message() << to_tokens << ", count " << count);
        Strip to(dtype, to_tokens, kHeadDim),
            expected = {dtype, to_tokens, kHeadDim};
        for (size_t t = 0; t < count; ++t) {
          expected.StoreKey(Normal(kHeadDim, static_cast<uint32_t>(t)), t);
        }
        const StripCopy copy = {dtype, kHeadDim, 0, count, 0, 64, to_tokens};
        CopyKeys(copy, from.data(), to.data());
        ASSERT_EQ(to.Bytes(), expected.Bytes());

        Strip values(dtype, to_tokens, kHeadDim),
            expected_values(dtype, to_tokens, kHeadDim);
        for (size_t t = 0; t < count; ++t) {
          expected_values.StoreValue(Normal(kHeadDim, static_cast<uint32_t>(t)),
                                     t);
        }
        CopyValues(copy, from_values.data(), values.data());
        ASSERT_EQ(values.Bytes(), expected_values.Bytes());
      }
    }
  }
}

TEST(KvStripTest, CopiesTokensToAnotherGroup) {
  constexpr size_t kHeadDim = 64;
  for (const KvDtype dtype : kDtypes) {
    Strip keys(dtype, 64, kHeadDim), values(dtype, 64, kHeadDim);
    for (size_t t = 0; t < 64; ++t) {
      const std::vector<float> x = Normal(kHeadDim, static_cast<uint32_t>(t));
      keys.StoreKey(x, t);
      values.StoreValue(x, t);
    }
    for (const size_t first : {0u, 1u, 15u}) {
      for (const size_t last : {1u, 7u, 16u, 17u, 32u}) {
        if (first >= last) continue;
        SCOPED_TRACE(testing::Message() << first << " to " << last);
        const StripCopy copy = {dtype,      kHeadDim, 32 + first, 32 + last,
                                16 + first, 64,       48};
        Strip to_keys(dtype, 48, kHeadDim), want_keys(dtype, 48, kHeadDim);
        Strip to_values(dtype, 48, kHeadDim), want_values(dtype, 48, kHeadDim);
        for (size_t t = first; t < last; ++t) {
          const std::vector<float> x =
              Normal(kHeadDim, static_cast<uint32_t>(32 + t));
          want_keys.StoreKey(x, 16 + t);
          want_values.StoreValue(x, 16 + t);
        }
        CopyKeys(copy, keys.data(), to_keys.data());
        CopyValues(copy, values.data(), to_values.data());
        ASSERT_EQ(to_keys.Bytes(), want_keys.Bytes());
        ASSERT_EQ(to_values.Bytes(), want_values.Bytes());
      }
    }
  }
}

}  // namespace
}  // namespace gkv
