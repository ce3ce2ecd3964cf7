// Attention over padded caches against double precision, written out.

#include <gtest/gtest.h>
#include <pthread.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "base/float16.h"
#include "base/flush_to_zero.h"
#include "ops/attention.h"
#include "ops/every_target.h"
#include "padded/padded_cache.h"

namespace gkv {
namespace {

struct Case {
  size_t kv_heads;
  size_t group;  // query heads per kv head
  size_t head_dim;
  KvDtype dtype;
  float soft_cap;
};

std::vector<float> Random(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

float Stored(KvDtype dtype, float x) {
  return dtype == KvDtype::kF32 ? x
                                : Float32FromBFloat16(BFloat16FromFloat32(x));
}

// out of one query head that sees tokens [begin, end) of k and v, both
// [tokens, kv_heads, head_dim].
std::vector<double> Oracle(const Case& c, const float* q, const float* k,
                           const float* v, size_t kv_head, size_t begin,
                           size_t end, double scale) {
  std::vector<double> weights;
  double sum = 0;
  for (size_t t = begin; t < end; ++t) {
    double score = 0;
    for (size_t d = 0; d < c.head_dim; ++d) {
      score += double{q[d]} *
               Stored(c.dtype, k[(t * c.kv_heads + kv_head) * c.head_dim + d]);
    }
    score *= scale;
    if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
    weights.push_back(std::exp(score));
    sum += weights.back();
  }
  std::vector<double> out(c.head_dim);
  for (size_t t = begin; t < end; ++t) {
    for (size_t d = 0; d < c.head_dim; ++d) {
      out[d] += weights[t - begin] / sum *
                Stored(c.dtype, v[(t * c.kv_heads + kv_head) * c.head_dim + d]);
    }
  }
  return out;
}

void Check(const Case& c, size_t tokens, size_t q_len, size_t capacity,
           size_t window) {
  const PaddedShape shape{1, capacity, window, c.kv_heads, c.head_dim, c.dtype};
  const auto pool = BlockPool::Create();
  pool->set_poison(true);
  PaddedCache cache(shape, pool);
  const size_t heads = c.kv_heads * c.group;
  const auto k = Random(tokens * c.kv_heads * c.head_dim, 1);
  const auto v = Random(tokens * c.kv_heads * c.head_dim, 2);
  const auto q = Random(q_len * heads * c.head_dim, 3);
  cache.Append(k.data(), v.data(), tokens);
  std::vector<float> out(q.size());
  const float scale = 1.5f / std::sqrt(static_cast<float>(c.head_dim));
  cache.Attend({q.data(), q_len, heads, scale, c.soft_cap}, out.data());
  for (size_t i = 0; i < q_len; ++i) {
    const size_t end = tokens - q_len + i + 1;
    const size_t begin = window != 0 && end > window ? end - window : 0;
    for (size_t head = 0; head < heads; ++head) {
      const size_t at = (i * heads + head) * c.head_dim;
      const auto expected = Oracle(c, &q[at], k.data(), v.data(),
                                   head / c.group, begin, end, scale);
      for (size_t d = 0; d < c.head_dim; ++d) {
        ASSERT_NEAR(out[at + d], expected[d], 2e-5)
            << "query " << i << " head " << head << " of " << tokens;
      }
    }
  }
}

TEST(PaddedAttentionTest, MatchesDoublePrecision) {
  for (const Case& c :
       {Case{1, 1, 1, KvDtype::kF32, 0}, Case{2, 4, 32, KvDtype::kF32, 0},
        Case{2, 3, 33, KvDtype::kBF16, 2},
        Case{1, 20, 100, KvDtype::kF32, 1.5f},
        Case{3, 1, 512, KvDtype::kBF16, 0}}) {
    for (const size_t tokens : {1, 15, 16, 17, 128, 129, 300}) {
      for (const size_t q_len : {size_t{1}, std::min<size_t>(tokens, 19)}) {
        Check(c, tokens, q_len, 300, 0);
        const size_t window = std::max<size_t>(1, tokens / 3);
        Check(c, tokens, q_len, window + q_len - 1, window);
      }
    }
  }
}

TEST(PaddedAttentionTest, TokensThatAreNotSeenNeverMatter) {
  PaddedCache cache({1, 64, 4, 1, 8, KvDtype::kF32});
  std::vector<float> bad(40 * 8, std::numeric_limits<float>::quiet_NaN());
  cache.Append(bad.data(), bad.data(), 40);
  const std::vector<float> good = Random(4 * 8, 1);
  cache.Append(good.data(), good.data(), 4);
  std::vector<float> q = Random(8, 2), out(8);
  cache.Attend({q.data(), 1, 1, 1.0f, 0}, out.data());
  for (const float x : out) EXPECT_TRUE(std::isfinite(x));
}

// Of queries that fill more than a tile, over the widest heads.
struct Attention {
  PaddedCache cache;
  std::vector<float> q;
  PaddedCache::Query query;
  std::vector<float> out;

  // Values of all sizes, too small to be normal among them.
  explicit Attention(KvDtype dtype)
      : cache({1, 300, 0, 1, kMaxHeadDim, dtype}),
        q(Random(kRows * kMaxHeadDim, 3)),
        query{q.data(), kRows, 1, 0.05f, 0},
        out(q.size()) {
    const auto k = Random(300 * kMaxHeadDim, 1);
    auto v = Random(300 * kMaxHeadDim, 2);
    for (size_t i = 0; i < v.size(); ++i) {
      if (i % 3 != 0) v[i] *= i % 3 == 1 ? 1e-38f : 1e-36f;
    }
    cache.Append(k.data(), v.data(), 300);
  }

  void Run() { cache.Attend(query, out.data()); }

 private:
  static constexpr size_t kRows = kMaxTileQueries + 4;
};

TEST(PaddedAttentionTest, ModesOfTheCallersThreadDoNotMatter) {
  for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16}) {
    Attention usual(dtype), changed(dtype);
    usual.Run();
    {
      const FlushToZero flush;
      changed.Run();
    }
    EXPECT_EQ(changed.out, usual.out);
    std::fesetround(FE_UPWARD);
    changed.Run();
    const int mode = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(changed.out, usual.out);
    EXPECT_EQ(mode, FE_UPWARD);
  }
}

// What bf16 holds is exact in float32. So are weights: both kinds give the same
// bits of it, by every target.
class PaddedTargetsTest : public EveryTargetTest {};

TEST_F(PaddedTargetsTest, StoredNumbersGiveTheSameBitsAsTheirFloats) {
  constexpr size_t kTokens = 301, kHeadDim = 96, kRows = 19;
  std::vector<float> k = Random(kTokens * kHeadDim, 1);
  std::vector<float> v = Random(kTokens * kHeadDim, 2);
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = Stored(KvDtype::kBF16, k[i]);
    v[i] = Stored(KvDtype::kBF16, v[i] * (i % 7 == 0 ? 1e-38f : 1.0f));
  }
  const std::vector<float> q = Random(kRows * 3 * kHeadDim, 3);
  ExpectSameBits([&] {
    std::vector<float> out[2];
    for (const KvDtype dtype : {KvDtype::kF32, KvDtype::kBF16}) {
      PaddedCache cache({1, kTokens, 0, 1, kHeadDim, dtype});
      cache.Append(k.data(), v.data(), kTokens);
      std::vector<float>& of_dtype = out[dtype == KvDtype::kBF16];
      of_dtype.resize(q.size());
      cache.Attend({q.data(), kRows, 3, 0.2f, 0}, of_dtype.data());
    }
    EXPECT_EQ(Bits(out[1]), Bits(out[0]));
    return out[1];
  });
}

// A thread as small as those that some programs start by the hundreds.
TEST(PaddedAttentionTest, TakesLittleStack) {
  Attention usual(KvDtype::kBF16), small(KvDtype::kBF16);
  usual.Run();
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 96 << 10), 0);
  pthread_t thread;
  const auto run = [](void* attention) -> void* {
    static_cast<Attention*>(attention)->Run();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &small), 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  EXPECT_EQ(small.out, usual.out);
}

TEST(PaddedAttentionTest, PadsGiveZeros) {
  PaddedCache cache({2, 8, 0, 1, 4, KvDtype::kF32});
  const std::vector<float> k = Random(2 * 3 * 4, 1);
  const size_t pads[] = {2, 3};
  cache.Append(k.data(), k.data(), 3, pads);
  std::vector<float> q = Random(2 * 3 * 4, 2), out(q.size(), 7.0f);
  cache.Attend({q.data(), 3, 1, 1.0f, 0}, out.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const bool token = i >= 8 && i < 12;  // row 0, column 2
    EXPECT_EQ(out[i], token ? k[i] : 0.0f) << i;
  }
}

TEST(PaddedAttentionTest, AWindowThatIsNotHeldIsRefused) {
  PaddedCache cache({1, 4, 4, 1, 4, KvDtype::kF32});
  const std::vector<float> k = Random(9 * 4, 1);
  cache.Append(k.data(), k.data(), 4);
  std::vector<float> out(16);
  cache.Attend({k.data(), 4, 1, 1.0f, 0}, out.data());  // nothing dropped yet
  cache.Append(k.data(), k.data(), 5);
  cache.Attend({k.data(), 1, 1, 1.0f, 0}, out.data());
  const std::vector<float> before = out;
  EXPECT_THROW(cache.Attend({k.data(), 2, 1, 1.0f, 0}, out.data()),
               InvalidArgument);
  EXPECT_EQ(out, before);
}

TEST(PaddedAttentionTest, BadArgumentsAreRefused) {
  PaddedCache cache({1, 4, 0, 2, 4, KvDtype::kF32});
  const std::vector<float> k = Random(8, 1);
  std::vector<float> out(64);
  const auto attend = [&](size_t q_len, size_t heads, float scale,
                          float soft_cap) {
    cache.Attend({k.data(), q_len, heads, scale, soft_cap}, out.data());
  };
  EXPECT_THROW(attend(1, 2, 1, 0), InvalidArgument);  // nothing given yet
  cache.Append(k.data(), k.data(), 1);
  EXPECT_NO_THROW(attend(1, 2, 1, 0));
  EXPECT_THROW(attend(0, 2, 1, 0), InvalidArgument);
  EXPECT_THROW(attend(2, 2, 1, 0), InvalidArgument);
  EXPECT_THROW(attend(1, 3, 1, 0), InvalidArgument);
  EXPECT_THROW(attend(1, 0, 1, 0), InvalidArgument);
  EXPECT_THROW(attend(1, 2, NAN, 0), InvalidArgument);
  EXPECT_THROW(attend(1, 2, 1, -1), InvalidArgument);
  EXPECT_THROW(attend(1, 2, 1, INFINITY), InvalidArgument);
}

}  // namespace
}  // namespace gkv
