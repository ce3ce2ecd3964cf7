#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "ops/attention_fixture.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

constexpr KvDtype kDtypes[] = {KvDtype::kF32, KvDtype::kBF16, KvDtype::kInt8};
constexpr size_t kBlockTokens[] = {16, 32, 64, 128};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string Name(const KvShape& shape) {
  return "dtype " + std::to_string(static_cast<int>(shape.dtype)) +
         ", head_dim " + std::to_string(shape.head_dim) + ", blocks of " +
         std::to_string(shape.block_tokens);
}

// `rows` consecutive positions up to `last`, `heads` queries each, that see
// `window` positions.
void AddRows(TestQueries& queries, size_t last, size_t rows, size_t heads,
             size_t window) {
  for (size_t p = last + 1 - rows; p <= last; ++p) {
    for (size_t h = 0; h < heads; ++h) {
      queries.Add(p + 1 < window ? 0 : p + 1 - window, p + 1);
    }
  }
}

// Ranges of every kind: rows of a prefill with and without a window, a decode
// row, ranges within one span, across its edge, of one position.
TestQueries Varied(size_t head_dim, float soft_cap) {
  TestQueries queries(head_dim, soft_cap);
  AddRows(queries, 130, 4, 4, 1000);  // across the edge of a span
  AddRows(queries, 300, 7, 1, 50);
  AddRows(queries, 299, 1, 4, 1000);
  for (const size_t begin : {0u, 1u, 127u, 128u, 200u}) {
    queries.Add(begin, begin + 1);
  }
  queries.Add(126, 130);
  queries.Add(15, 17);
  queries.Add(128, 256);
  queries.Add(0, 301);
  return queries;
}

class AttentionTest : public EveryTargetTest {};

TEST_F(AttentionTest, MatchesOracle) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 64u, 96u, 256u}) {
      for (const float soft_cap : {0.0f, 50.0f, 1.0f}) {
        const KvShape shape = {dtype, head_dim, 32, 0, 301};
        SCOPED_TRACE(Name(shape) + ", cap " + std::to_string(soft_cap));
        const TestKv kv(shape);
        const TestQueries queries = Varied(head_dim, soft_cap);
        std::vector<AttentionOracle> expected;
        for (size_t i = 0; i < queries.size(); ++i) {
          expected.emplace_back(kv, queries, i);
        }
        OnEveryTarget([&] {
          const std::vector<float> out = queries.Attend(kv.View());
          for (size_t i = 0; i < out.size(); ++i) {
            const AttentionOracle& query = expected[i / head_dim];
            ASSERT_NEAR(out[i], query.out[i % head_dim],
                        query.tolerance[i % head_dim])
                << "query " << i / head_dim << ", dim " << i % head_dim;
          }
        });
      }
    }
  }
}

// Positions far into a conversation, of which the first blocks are gone.
TEST_F(AttentionTest, MatchesOracleFarIntoAConversation) {
  for (const size_t window : {512u, 1024u}) {
    for (const size_t last : {5119u, 5120u, 5200u}) {
      const KvShape shape = {KvDtype::kBF16, 256, 64, last + 1 - window,
                             last + 1};
      const TestKv kv(shape);
      TestQueries queries(256);
      AddRows(queries, last, 1, 4, window);
      OnEveryTarget([&] {
        const std::vector<float> out = queries.Attend(kv.View());
        for (size_t q = 0; q < 4; ++q) {
          const AttentionOracle expected(kv, queries, q);
          for (size_t d = 0; d < 256; ++d) {
            ASSERT_NEAR(out[q * 256 + d], expected.out[d],
                        expected.tolerance[d])
                << q << ' ' << d;
          }
        }
      });
    }
  }
}

TEST_F(AttentionTest, GroupingIntoTilesChangesNoBit) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 96u, 256u}) {
      const KvShape shape = {dtype, head_dim, 64, 0, 301};
      SCOPED_TRACE(Name(shape));
      const TestKv kv(shape);
      const TestQueries queries = Varied(head_dim, 0);
      OnEveryTarget([&] {
        const std::vector<uint32_t> alone = Bits(queries.Attend(kv.View(), 1));
        for (size_t tile = 2; tile <= kMaxBlockQueries; ++tile) {
          ASSERT_EQ(Bits(queries.Attend(kv.View(), tile)), alone) << tile;
        }
      });
    }
  }
}

TEST_F(AttentionTest, BlockSizeChangesNoBit) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 256u}) {
      const TestQueries queries = Varied(head_dim, 50.0f);
      OnEveryTarget([&] {
        std::vector<uint32_t> first;
        for (const size_t block_tokens : kBlockTokens) {
          const KvShape shape = {dtype, head_dim, block_tokens, 0, 301};
          SCOPED_TRACE(Name(shape));
          const std::vector<uint32_t> bits =
              Bits(queries.Attend(TestKv(shape).View()));
          if (first.empty()) first = bits;
          ASSERT_EQ(bits, first);
        }
      });
    }
  }
}

TEST_F(AttentionTest, FusedTargetsAgreeBitForBit) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 64u, 96u, 256u, 512u}) {
      for (const float soft_cap : {0.0f, 50.0f}) {
        const KvShape shape = {dtype, head_dim, 32, 0, 301};
        SCOPED_TRACE(Name(shape));
        const TestKv kv(shape);
        const TestQueries queries = Varied(head_dim, soft_cap);
        ExpectSameBits([&] { return queries.Attend(kv.View()); });
      }
    }
  }
}

// Partials of all spans, computed out of order and joined in order.
std::vector<float> ByPieces(const TestQueries& queries, const KvHeadView& kv,
                            size_t head_dim, size_t num_spans, size_t tile) {
  const size_t stride = PartialFloats(head_dim);
  std::vector<float> out(queries.size() * head_dim);
  queries.ForTiles(tile, [&](size_t first, const QueryTile& q) {
    std::vector<std::vector<float>> partials(
        num_spans, std::vector<float>(q.num_queries * stride, kNan));
    for (size_t span = num_spans; span-- > 0;) {
      AttentionSpanPartial(kv, q, span, partials[span].data());
    }
    for (size_t i = 0; i < q.num_queries; ++i) {
      float* state = partials[0].data() + i * stride;
      for (size_t span = 1; span < num_spans; ++span) {
        AttentionMerge(partials[span].data() + i * stride, head_dim, state);
      }
      AttentionFinish(state, head_dim, out.data() + (first + i) * head_dim);
    }
  });
  return out;
}

TEST_F(AttentionTest, PiecesGiveTheBitsOfTheWhole) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 256u}) {
      const KvShape shape = {dtype, head_dim, 16, 0, 301};
      SCOPED_TRACE(Name(shape));
      const TestKv kv(shape);
      const TestQueries queries = Varied(head_dim, 0);
      OnEveryTarget([&] {
        const std::vector<uint32_t> whole = Bits(queries.Attend(kv.View()));
        for (const size_t tile : {1u, 4u, 16u}) {
          ASSERT_EQ(Bits(ByPieces(queries, kv.View(), head_dim, 3, tile)),
                    whole);
        }
      });
    }
  }
}

// Of more keys and values than a near cache holds, those of the next span are
// fetched meanwhile, and whole spans may enter the states at once. Pieces never
// do that.
TEST_F(AttentionTest, ManyPositionsGiveTheBitsOfTheirPieces) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {96u, 512u}) {
      for (const size_t first : {0u, 256u}) {
        const KvShape shape = {dtype, head_dim, 16, first, first + 1301};
        SCOPED_TRACE(Name(shape));
        TestKv kv(shape);
        for (size_t p = first + 300; p < first + 1301; p += 250) {
          kv.SetValue(p, std::vector<float>(head_dim, p % 500 ? 0.0f : -0.0f));
        }
        TestQueries queries(head_dim);
        AddRows(queries, first + 1300, 9, 4, 1293);
        queries.Add(first + 1, first + 1280);
        queries.Add(first, first + 2);
        queries.Add(first + 1290, first + 1301);
        OnEveryTarget([&] {
          const std::vector<uint32_t> pieces =
              Bits(ByPieces(queries, kv.View(), head_dim, 13, 16));
          for (const size_t tile : {1u, 4u, 7u, 12u, 16u, 32u}) {
            ASSERT_EQ(Bits(queries.Attend(kv.View(), tile)), pieces) << tile;
          }
        });
      }
    }
  }
}

// Whole spans may enter the states at once: only those that every query of the
// tile sees to the last position, with its soft cap.
TEST_F(AttentionTest, RangesAroundSpansGiveTheBitsOfTheirPieces) {
  constexpr size_t kBegins[] = {0, 0, 1, 127, 128, 129};
  constexpr size_t kEnds[] = {255, 256, 257, 383, 384, 385, 511, 512};
  std::mt19937 rng(11);
  for (const KvDtype dtype : kDtypes) {
    const TestKv kv({dtype, 32, 32, 0, 512});
    for (const float soft_cap : {0.0f, 1.0f}) {
      TestQueries queries(32, soft_cap);
      for (int tile = 0; tile < 12; ++tile) {
        const size_t shift = rng() % 6;
        for (int i = 0; i < 16; ++i) {
          queries.Add(kBegins[rng() % 6],
                      kEnds[std::min<size_t>(7, shift + rng() % 3)]);
        }
      }
      OnEveryTarget([&] {
        const std::vector<uint32_t> pieces =
            Bits(ByPieces(queries, kv.View(), 32, 4, 16));
        for (const size_t tile : {4u, 12u, 16u, 32u}) {
          ASSERT_EQ(Bits(queries.Attend(kv.View(), tile)), pieces)
              << tile << ", cap " << soft_cap;
        }
      });
    }
  }
}

// No query sees position 40 or those from 205 on.
TEST_F(AttentionTest, UnseenPositionsHaveNoInfluence) {
  for (const KvDtype dtype : kDtypes) {
    for (const size_t head_dim : {32u, 256u}) {
      for (const size_t block_tokens : kBlockTokens) {
        const KvShape shape = {dtype, head_dim, block_tokens, 0, 300};
        SCOPED_TRACE(Name(shape));
        TestQueries queries(head_dim);
        queries.Add(0, 40);
        AddRows(queries, 39, 3, 1, 30);
        for (size_t i = 0; i < 12; ++i) queries.Add(41 + i % 3, 150 + 5 * i);
        const TestKv clean(shape);
        for (const float poison : {kNan, kInfinity, 1e30f}) {
          TestKv poisoned(shape);
          const std::vector<float> bad(head_dim, poison);
          for (size_t p = 0; p < 300; ++p) {
            if (p >= 205 || p == 40) {
              poisoned.SetKey(p, bad);
              poisoned.SetValue(p, bad);
            }
          }
          OnEveryTarget([&] {
            ASSERT_EQ(Bits(queries.Attend(poisoned.View())),
                      Bits(queries.Attend(clean.View())));
          });
        }
      }
    }
  }
}

// Also from the queries of its tile that do see it.
TEST_F(AttentionTest, NanReachesExactlyTheQueriesThatSeeIt) {
  for (const KvDtype dtype : kDtypes) {
    const KvShape shape = {dtype, 64, 32, 0, 301};
    SCOPED_TRACE(Name(shape));
    const TestQueries queries = Varied(64, 0);
    for (const size_t bad : {0u, 16u, 127u, 128u, 130u, 254u, 300u}) {
      for (const bool key : {true, false}) {
        TestKv kv(shape);
        std::vector<float> x = key ? kv.Key(bad) : kv.Value(bad);
        x[5] = kNan;
        if (key) {
          kv.SetKey(bad, x);
        } else {
          kv.SetValue(bad, x);
        }
        OnEveryTarget([&] {
          const std::vector<float> out = queries.Attend(kv.View());
          for (size_t i = 0; i < queries.size(); ++i) {
            const bool sees = queries.begin(i) <= bad && bad < queries.end(i);
            ASSERT_EQ(std::isnan(out[i * 64 + 5]), sees)
                << "query " << i << ", position " << bad;
          }
        });
      }
    }
  }
}

// Around the smallest normal number: products and sums that are too small count
// as zero everywhere, whatever takes two positions at a time.
TEST_F(AttentionTest, TinyValuesGiveTheSameBits) {
  const KvShape shape = {KvDtype::kBF16, 64, 32, 0, 301};
  const TestQueries queries = Varied(64, 0);
  for (const float scale : {1e-36f, 1e-37f, 1e-38f, 1e-39f}) {
    TestKv kv(shape);
    for (size_t p = 0; p < 301; ++p) {
      std::vector<float> x = kv.Value(p);
      for (float& value : x) value *= scale;
      kv.SetValue(p, x);
    }
    ExpectSameBits([&] { return queries.Attend(kv.View()); });
  }
}

// Of ranges that begin and end anywhere, on values of all sizes, among them
// zeros of both signs: the same bits by all targets, each query also alone.
TEST_F(AttentionTest, RandomRangesGiveTheSameBits) {
  std::mt19937 rng(7);
  for (const size_t head_dim : {32u, 160u, 512u}) {
    for (int round = 0; round < 4; ++round) {
      const size_t tokens = 130 + rng() % 200;
      TestKv kv({KvDtype::kBF16, head_dim, 32, 0, tokens});
      for (size_t p = 0; p < tokens; ++p) {
        std::vector<float> x = kv.Value(p);
        for (float& value : x) {
          value = std::ldexp(value, static_cast<int>(rng() % 160) - 140);
          if (rng() % 4 == 0) value = rng() % 2 == 0 ? 0.0f : -0.0f;
        }
        kv.SetValue(p, x);
      }
      TestQueries queries(head_dim);
      for (int i = 0; i < 40; ++i) {
        const size_t begin = rng() % tokens;
        const size_t most = i % 2 == 0 ? tokens - begin : 3;
        queries.Add(begin, std::min(tokens, begin + 1 + rng() % most));
      }
      ExpectSameBits([&] { return queries.Attend(kv.View()); });
      OnEveryTarget([&] {
        ASSERT_EQ(Bits(queries.Attend(kv.View(), 1)),
                  Bits(queries.Attend(kv.View())));
      });
    }
  }
}

TEST_F(AttentionTest, LargeScoresPickTheLargest) {
  const KvShape shape = {KvDtype::kF32, 32, 16, 0, 300};
  TestKv kv(shape);
  TestQueries queries(32);
  queries.Add(0, 300);
  queries.query(0) = std::vector<float>(32, 1e15f);
  for (size_t p = 0; p < 300; ++p) {
    kv.SetKey(p, std::vector<float>(32, p == 170 ? 2e15f : -1e15f));
  }
  OnEveryTarget([&] { ASSERT_EQ(queries.Attend(kv.View()), kv.Value(170)); });
}

// A weight of exactly one: the value itself comes back.
TEST_F(AttentionTest, OnePositionGivesItsValue) {
  for (const KvDtype dtype : kDtypes) {
    const KvShape shape = {dtype, 64, 32, 0, 300};
    const TestKv kv(shape);
    OnEveryTarget([&] {
      for (const size_t p : {0u, 15u, 16u, 127u, 128u, 299u}) {
        TestQueries queries(64);
        queries.Add(p, p + 1);
        ASSERT_EQ(queries.Attend(kv.View()), kv.Value(p)) << p;
      }
    });
  }
}

TEST_F(AttentionTest, NeutralPartialsAreNoOps) {
  constexpr size_t kHeadDim = 64;
  const size_t floats = PartialFloats(kHeadDim);
  const TestKv kv({KvDtype::kBF16, kHeadDim, 32, 0, 300});
  TestQueries queries(kHeadDim);
  queries.Add(0, 100);    // sees span 0 only
  queries.Add(130, 280);  // sees spans 1 and 2
  OnEveryTarget([&] {
    queries.ForTiles(2, [&](size_t, const QueryTile& tile) {
      std::vector<float> first(2 * floats, kNan), second(2 * floats, kNan);
      AttentionSpanPartial(kv.View(), tile, 0, first.data());
      AttentionSpanPartial(kv.View(), tile, 1, second.data());
      const float* neutral = second.data();
      EXPECT_EQ(neutral[kHeadDim], -kInfinity);
      EXPECT_EQ(neutral[kHeadDim + 1], 0.0f);
      EXPECT_EQ(first[floats + kHeadDim], -kInfinity);
      EXPECT_EQ(first[floats + kHeadDim + 1], 0.0f);

      const auto head = [&](const float* p) {
        return Bits({p, p + kHeadDim + 2});
      };
      const std::vector<uint32_t> before = head(first.data());
      AttentionMerge(neutral, kHeadDim, first.data());
      EXPECT_EQ(head(first.data()), before);
      // A neutral state becomes the partial.
      AttentionMerge(second.data() + floats, kHeadDim, first.data() + floats);
      EXPECT_EQ(head(first.data() + floats), head(second.data() + floats));
      // And stays neutral when joined with a neutral one.
      std::vector<float> state(neutral, neutral + floats);
      AttentionMerge(neutral, kHeadDim, state.data());
      EXPECT_EQ(head(state.data()), head(neutral));
    });
  });
}

// Zeros keep their sign, which a product with zero and a sum would lose.
TEST_F(AttentionTest, NeutralPartialsKeepSignedZeros) {
  constexpr size_t kHeadDim = 32;
  std::vector<float> neutral(PartialFloats(kHeadDim), 0.0f);
  neutral[kHeadDim] = -kInfinity;
  std::vector<float> zeros(PartialFloats(kHeadDim), -0.0f);
  zeros[kHeadDim] = 2.5f;
  zeros[kHeadDim + 1] = 1.0f;
  OnEveryTarget([&] {
    std::vector<float> state = zeros;
    AttentionMerge(neutral.data(), kHeadDim, state.data());
    EXPECT_EQ(Bits(state), Bits(zeros));
    state = neutral;
    AttentionMerge(zeros.data(), kHeadDim, state.data());
    EXPECT_EQ(Bits(state), Bits(zeros));
  });
}

// Nobody sees the span at all: no block of it need exist.
TEST_F(AttentionTest, SpanThatNoQuerySeesReadsNothing) {
  const KvHeadView kv = {nullptr, 0, 32, 0, 0, KvDtype::kInt8};
  TestQueries queries(32);
  for (int i = 0; i < 16; ++i) queries.Add(0, 10);
  OnEveryTarget([&] {
    queries.ForTiles(16, [&](size_t, const QueryTile& tile) {
      std::vector<float> partial(16 * PartialFloats(32), kNan);
      AttentionSpanPartial(kv, tile, 7, partial.data());
      for (size_t i = 0; i < 16; ++i) {
        const float* one = partial.data() + i * PartialFloats(32);
        EXPECT_EQ(one[32], -kInfinity);
        EXPECT_EQ(one[33], 0.0f);
      }
    });
  });
}

TEST_F(AttentionTest, MergeOfEqualMaximaRescalesByExactlyOne) {
  constexpr size_t kHeadDim = 32;
  OnEveryTarget([&] {
    std::vector<float> state(PartialFloats(kHeadDim));
    std::vector<float> partial(PartialFloats(kHeadDim));
    for (size_t i = 0; i < kHeadDim; ++i) {
      state[i] = 0.1f * static_cast<float>(i);
      partial[i] = 1.0f / static_cast<float>(i + 1);
    }
    for (const float max : {0.0f, -81.3f, 1e20f}) {
      std::vector<float> joined = state;
      joined[kHeadDim] = partial[kHeadDim] = max;
      joined[kHeadDim + 1] = 1.75f;
      partial[kHeadDim + 1] = 3.5f;
      AttentionMerge(partial.data(), kHeadDim, joined.data());
      for (size_t i = 0; i < kHeadDim; ++i) {
        ASSERT_EQ(joined[i], state[i] + partial[i]) << i;
      }
      ASSERT_EQ(joined[kHeadDim], max);
      ASSERT_EQ(joined[kHeadDim + 1], 5.25f);
    }
  });
}

}  // namespace
}  // namespace gkv
