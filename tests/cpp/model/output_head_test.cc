#include "model/output_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "base/sanitized.h"
#include "model/tiny_model.h"
#include "ops/logits.h"
#include "ops/target.h"

namespace gkv {
namespace {

constexpr size_t kHidden = 256;
constexpr size_t kVocab = 8003;  // the last group is not full
// Inputs that comparisons over many repeat.
constexpr uint32_t kSeeds = kSanitized ? 1 : 4;

// A head of random weights of one type, and the ways to compute rows.
class Head {
 public:
  explicit Head(TensorType type, float soft_cap = 0, uint32_t seed = 3,
                size_t threads = 2)
      : pool_(threads) {
    config_.hidden_size = kHidden;
    config_.vocab_size = kVocab;
    config_.final_soft_cap = soft_cap;
    std::mt19937 rng(seed);
    source_ = RandomTensor(type, kVocab, kHidden, rng, -0.2f, 0.2f);
    PackedMatrix& matrix = weights_.embedding;
    matrix.type = type;
    matrix.rows = kVocab;
    matrix.cols = kHidden;
    matrix.owned = AlignedBuffer<uint8_t>(NumGroups(kVocab) *
                                          GroupBytes(type, kHidden));
    matrix.data = matrix.owned.data();
    Pack();
    weights_.final_norm = FloatVector(kHidden);
    for (size_t i = 0; i < kHidden; ++i) {
      weights_.final_norm[i] = 1 + static_cast<float>(i % 7);
    }
    head_ = std::make_unique<OutputHead>(config_, weights_, pool_);
  }

  // Of each row of x [rows, kHidden] the logits, or as many of the largest as
  // `counts` says; 0: all.
  struct Found {
    std::vector<std::vector<float>> logits;
    std::vector<TokenList> largest;
  };
  Found Compute(const std::vector<std::vector<float>>& x,
                const std::vector<size_t>& counts) {
    Found found{std::vector<std::vector<float>>(x.size()),
                std::vector<TokenList>(x.size())};
    std::vector<OutputHead::Row> rows;
    for (size_t i = 0; i < x.size(); ++i) {
      if (counts[i] == 0) {
        found.logits[i].resize(kVocab);
        rows.push_back({x[i].data(), found.logits[i].data()});
      } else {
        rows.push_back({x[i].data(), nullptr, &found.largest[i], counts[i]});
      }
    }
    head_->Compute(rows);
    return found;
  }
  std::vector<std::vector<float>> All(
      const std::vector<std::vector<float>>& x) {
    return Compute(x, std::vector<size_t>(x.size(), 0)).logits;
  }
  std::vector<TokenList> Largest(const std::vector<std::vector<float>>& x,
                                 size_t count) {
    return Compute(x, std::vector<size_t>(x.size(), count)).largest;
  }
  // Makes the first scale of a token's row NaN, and those of the `zeros` rows
  // behind it zero. Requires: Q8_0; nothing was computed yet.
  void SpoilScale(size_t token, size_t zeros = 0) {
    const size_t row_bytes = RowBytes(TensorType::kQ8_0, kHidden);
    uint8_t* const row = source_.data() + token * row_bytes;
    row[0] = row[1] = 0x7F;  // a half-precision NaN
    std::fill_n(row + row_bytes, zeros * row_bytes, uint8_t{0});
    Pack();
  }
  // All of them. Requires: as SpoilScale.
  void MakeWeightsNegative() {
    const size_t block = Info(TensorType::kQ8_0).bytes;
    for (size_t i = 0; i < source_.size(); ++i) {
      if (i % block >= sizeof(uint16_t)) source_[i] |= 0x80;
    }
    Pack();
  }
  // Of the last call.
  size_t contenders() const { return head_->contenders(); }

 private:
  void Pack() {
    PackedMatrix& matrix = weights_.embedding;
    const size_t row_bytes = RowBytes(matrix.type, kHidden);
    for (size_t g = 0; g < NumGroups(kVocab); ++g) {
      PackGroup(matrix.type, source_.data() + g * kRowGroup * row_bytes,
                std::min(kRowGroup, kVocab - g * kRowGroup), kHidden,
                matrix.owned.data() + g * GroupBytes(matrix.type, kHidden));
    }
  }

  std::vector<uint8_t> source_;  // the weights, unpacked
  ModelConfig config_;
  Weights weights_;
  ThreadPool pool_;
  std::unique_ptr<OutputHead> head_;
};

// Rows with a few channels far larger than the rest, as models have them: the
// first plane then loses much.
std::vector<std::vector<float>> RandomRows(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(count, std::vector<float>(kHidden));
  for (auto& row : rows) {
    for (float& value : row) value = normal(rng);
    for (size_t i = 5; i < kHidden; i += 32) row[i] *= 40;
  }
  return rows;
}

// By descending logit, ascending id; without NaN and -inf.
std::vector<std::pair<int32_t, float>> Sorted(const TokenList& tokens) {
  std::vector<std::pair<int32_t, float>> sorted;
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    sorted.emplace_back(tokens.ids[i], tokens.logits[i]);
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  return sorted;
}

void ExpectLargest(const TokenList& found, const std::vector<float>& full,
                   size_t count) {
  TokenList all;
  TokensFrom(full.data(), full.size(), -std::numeric_limits<float>::infinity(),
             all);
  auto expected = Sorted(all), largest = Sorted(found);
  EXPECT_TRUE(std::is_sorted(found.ids.begin(), found.ids.end()));
  for (const auto& [id, logit] : largest) {
    ASSERT_TRUE(id >= 0 && id < static_cast<int32_t>(full.size()));
    EXPECT_EQ(
        std::memcmp(&logit, &full[static_cast<size_t>(id)], sizeof(float)), 0)
        << "token " << id;
  }
  expected.resize(std::min(count, expected.size()));
  ASSERT_GE(largest.size(), expected.size());
  largest.resize(expected.size());
  EXPECT_EQ(largest, expected);
}

// Of all rows, in one call and in others of which some want all logits.
void ExpectLargest(Head& head, const std::vector<std::vector<float>>& x,
                   size_t count) {
  const auto full = head.All(x);
  std::vector<size_t> mixed(x.size());
  for (size_t i = 0; i < x.size(); ++i) mixed[i] = i % 3 == 0 ? 0 : count;
  const Head::Found beside = head.Compute(x, mixed);
  const std::vector<TokenList> largest = head.Largest(x, count);
  for (size_t i = 0; i < x.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "row " << i << ", the " << count);
    ExpectLargest(largest[i], full[i], count);
    if (mixed[i] != 0) {
      ExpectLargest(beside.largest[i], full[i], count);
    } else {
      EXPECT_EQ(std::memcmp(beside.logits[i].data(), full[i].data(),
                            kVocab * sizeof(float)),
                0);
    }
  }
}

class OutputHeadTest : public testing::TestWithParam<TensorType> {};

TEST_P(OutputHeadTest, TheLargestAreThoseOfFullRows) {
  Head head(GetParam());
  for (const size_t count : {1, 2, 7, 15}) {
    size_t contenders = 0;
    for (uint32_t seed = 0; seed < kSeeds; ++seed) {
      const auto x = RandomRows(24, seed + 10 * static_cast<uint32_t>(count));
      ExpectLargest(head, x, count);
      contenders += head.contenders();
    }
    // Else nothing was left out, and this has shown nothing.
    EXPECT_LT(contenders, kSeeds * 24 * NumGroups(kVocab) / 2) << count;
  }
}

TEST_P(OutputHeadTest, ALoneRowHasTheSame) {
  Head head(GetParam());
  for (const size_t count : {1, 15}) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      const auto x = RandomRows(1, 50 + seed);
      const auto full = head.All(x);
      ExpectLargest(head.Largest(x, count)[0], full[0], count);
      EXPECT_LT(head.contenders(), 2 * count + 16);
    }
  }
}

// A cap brings logits together where no row is screened, too.
TEST_P(OutputHeadTest, ALoneRowUnderASoftCap) {
  for (const float cap : {3000.0f, 30.0f, 5.0f, 0.5f}) {
    SCOPED_TRACE(cap);
    Head head(GetParam(), cap);
    for (const size_t count : {1, 15}) {
      for (uint32_t seed = 0; seed < kSeeds; ++seed) {
        const auto x = RandomRows(1, 50 + seed);
        ExpectLargest(head.Largest(x, count)[0], head.All(x)[0], count);
      }
    }
  }
}

TEST_P(OutputHeadTest, SeveralRowsUnderASoftCap) {
  for (const float cap : {300.0f, 5.0f}) {
    SCOPED_TRACE(cap);
    Head head(GetParam(), cap);
    for (const size_t count : {1, 15}) {
      ExpectLargest(head, RandomRows(6, 8), count);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, OutputHeadTest,
                         testing::Values(TensorType::kF32, TensorType::kBF16,
                                         TensorType::kQ8_0, TensorType::kQ4_0,
                                         TensorType::kQ6_K, TensorType::kQ4_K),
                         [](const auto& info) {
                           return std::string(Info(info.param).name);
                         });

// Where the second plane decides between nearly equal logits, leaving it out
// would be seen.
TEST(OutputHeadCloseRaceTest, TheSecondPlaneDecides) {
  Head head(TensorType::kQ4_0, 0, 8);
  size_t decided = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    // Two rows: one alone has both planes everywhere.
    auto x = RandomRows(1, 1000 + seed);
    x.push_back(x[0]);
    const auto full = head.All(x);
    const auto largest = head.Largest(x, 1);
    for (size_t i = 0; i < x.size(); ++i) ExpectLargest(largest[i], full[i], 1);
    decided += head.contenders() > 2;
  }
  EXPECT_GT(decided, 20u);
}

TEST(OutputHeadEdgeTest, NumbersThatAreNoneChangeNothing) {
  Head head(TensorType::kQ8_0);
  auto x = RandomRows(12, 5);
  x[2][7] = std::numeric_limits<float>::quiet_NaN();
  x[5][9] = std::numeric_limits<float>::infinity();
  x[8].assign(kHidden, 0.0f);
  for (const size_t count : {1, 15}) ExpectLargest(head, x, count);
}

// A weight that is no number: its group's bound tells nothing.
TEST(OutputHeadEdgeTest, WeightsThatAreNoNumbers) {
  Head head(TensorType::kQ8_0);
  head.SpoilScale(40);
  head.SpoilScale(kVocab - 1);
  const auto x = RandomRows(12, 5);
  for (const size_t count : {1, 15}) ExpectLargest(head, x, count);
}

// Nor does it with rows of zeros behind it and others before it.
TEST(OutputHeadEdgeTest, NoNumbersBeforeZeros) {
  Head head(TensorType::kQ8_0);
  for (size_t g = 0; g < kVocab / kRowGroup; g += 2) {
    head.SpoilScale(g * kRowGroup + 8, 7);
  }
  for (uint32_t seed = 0; seed < 8; ++seed) {
    ExpectLargest(head, RandomRows(24, 20 + seed), 15);
  }
}

// More than there are groups, and than there are tokens.
TEST(OutputHeadEdgeTest, MoreThanThereAre) {
  Head head(TensorType::kQ8_0);
  const auto x = RandomRows(4, 5);
  for (const size_t count :
       {NumGroups(kVocab), kVocab - 1, kVocab, 2 * kVocab}) {
    ExpectLargest(head, x, count);
  }
}

// All logits are one number: the first tokens are the largest.
TEST(OutputHeadEdgeTest, EqualLogits) {
  Head head(TensorType::kQ8_0);
  const std::vector<std::vector<float>> x(4, std::vector<float>(kHidden));
  for (const size_t count : {1, 15}) ExpectLargest(head, x, count);
}

// Caps that leave logits as they are nearly, that bring many together, and that
// make most of them one number, of which the first are the largest.
TEST(OutputHeadEdgeTest, TheLargestUnderASoftCap) {
  for (const float cap : {3000.0f, 300.0f, 30.0f, 5.0f, 0.5f}) {
    SCOPED_TRACE(cap);
    Head head(TensorType::kQ8_0, cap);
    for (const size_t count : {1, 15}) {
      for (uint32_t seed = 0; seed < kSeeds; ++seed) {
        ExpectLargest(head, RandomRows(16, seed), count);
      }
    }
    // Else nothing was left out.
    if (cap >= 300) {
      EXPECT_LT(head.contenders(), 16 * NumGroups(kVocab) / 2);
    }
  }
}

// Logits far below zero: the cap makes all of them its negative.
TEST(OutputHeadEdgeTest, TheLargestUnderASoftCapFarBelowZero) {
  constexpr float kCap = 0.125f;
  Head head(TensorType::kQ8_0, kCap);
  head.MakeWeightsNegative();
  auto x = RandomRows(16, 6);
  for (auto& row : x) {
    for (float& value : row) value = std::abs(value);
  }
  const auto full = head.All(x);
  for (const float logit : full[0]) ASSERT_LT(logit, -0.99999f * kCap);
  for (const size_t count : {1, 15}) ExpectLargest(head, x, count);
}

TEST(OutputHeadEdgeTest, ThreadsDoNotMatter) {
  const auto x = RandomRows(16, 7);
  Head one(TensorType::kQ8_0, 0, 3, 1), five(TensorType::kQ8_0, 0, 3, 5);
  const auto a = one.Largest(x, 7), b = five.Largest(x, 7);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(a[i].ids, b[i].ids);
    EXPECT_EQ(a[i].logits, b[i].logits);
  }
}

TEST(OutputHeadEdgeTest, NoRows) {
  Head head(TensorType::kQ8_0);
  EXPECT_TRUE(head.All({}).empty());
}

}  // namespace
}  // namespace gkv
