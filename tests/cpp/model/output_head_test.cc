#include "model/output_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "model/tiny_model.h"
#include "ops/logits.h"
#include "ops/target.h"

namespace gkv {
namespace {

constexpr size_t kHidden = 256;
constexpr size_t kVocab = 1003;  // the last group is not full

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
    const std::vector<uint8_t> source =
        RandomTensor(type, kVocab, kHidden, rng, -0.2f, 0.2f);
    PackedMatrix& matrix = weights_.embedding;
    matrix.type = type;
    matrix.rows = kVocab;
    matrix.cols = kHidden;
    const size_t group_bytes = GroupBytes(type, kHidden);
    matrix.owned = AlignedBuffer<uint8_t>(NumGroups(kVocab) * group_bytes);
    for (size_t g = 0; g < NumGroups(kVocab); ++g) {
      PackGroup(type,
                source.data() + g * kRowGroup * RowBytes(type, kHidden),
                std::min(kRowGroup, kVocab - g * kRowGroup), kHidden,
                matrix.owned.data() + g * group_bytes);
    }
    matrix.data = matrix.owned.data();
    weights_.final_norm = FloatVector(kHidden);
    for (size_t i = 0; i < kHidden; ++i) {
      weights_.final_norm[i] = 1 + static_cast<float>(i % 7);
    }
    head_ = std::make_unique<OutputHead>(config_, weights_, pool_);
  }

  // Logits of each row of x [rows, kHidden].
  std::vector<std::vector<float>> Compute(
      const std::vector<std::vector<float>>& x,
      const std::vector<bool>& argmax_only) {
    std::vector<std::vector<float>> logits(x.size(),
                                           std::vector<float>(kVocab));
    std::vector<OutputHead::Row> rows;
    for (size_t i = 0; i < x.size(); ++i) {
      rows.push_back({x[i].data(), logits[i].data(), argmax_only[i]});
    }
    head_->Compute(rows);
    return logits;
  }

 private:
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

void ExpectSameWinner(const std::vector<float>& found,
                      const std::vector<float>& full, size_t row) {
  const ScoredToken a = ArgMax(found.data(), kVocab);
  const ScoredToken b = ArgMax(full.data(), kVocab);
  EXPECT_EQ(a.id, b.id) << "row " << row;
  EXPECT_EQ(std::memcmp(&a.logit, &b.logit, sizeof(float)), 0) << "row " << row;
}

class OutputHeadTest : public testing::TestWithParam<TensorType> {};

TEST_P(OutputHeadTest, ScreenedRowsHaveTheWinnersOfFullRows) {
  Head head(GetParam());
  size_t differing = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const auto x = RandomRows(24, seed);
    const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
    const auto screened = head.Compute(x, std::vector<bool>(x.size(), true));
    for (size_t i = 0; i < x.size(); ++i) {
      ExpectSameWinner(screened[i], full[i], i);
      differing += std::memcmp(screened[i].data(), full[i].data(),
                               kVocab * sizeof(float)) != 0;
    }
  }
  // Else nothing was left out, and this has shown nothing.
  EXPECT_EQ(differing > 0, UsesQuantizedActivations(GetParam()));
}

TEST_P(OutputHeadTest, FullRowsAreTheSameBesideScreenedOnes) {
  Head head(GetParam());
  const auto x = RandomRows(20, 99);
  std::vector<bool> mixed(x.size());
  for (size_t i = 0; i < x.size(); ++i) mixed[i] = i % 3 != 0;
  const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
  const auto found = head.Compute(x, mixed);
  for (size_t i = 0; i < x.size(); ++i) {
    ExpectSameWinner(found[i], full[i], i);
    if (mixed[i]) continue;
    EXPECT_EQ(std::memcmp(found[i].data(), full[i].data(),
                          kVocab * sizeof(float)),
              0)
        << "row " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types, OutputHeadTest,
    testing::Values(TensorType::kF32, TensorType::kBF16, TensorType::kQ8_0,
                    TensorType::kQ4_0, TensorType::kQ6_K, TensorType::kQ4_K),
    [](const auto& info) { return std::string(Info(info.param).name); });

// Where the second plane decides between two nearly equal logits, leaving it
// out would be seen: the first plane alone gives other winners.
TEST(OutputHeadCloseRaceTest, TheSecondPlaneDecides) {
  Head head(TensorType::kQ4_0, 0, 8);
  size_t decided = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    auto x = RandomRows(16, 1000 + seed);
    const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
    const auto screened = head.Compute(x, std::vector<bool>(x.size(), true));
    for (size_t i = 0; i < x.size(); ++i) {
      ExpectSameWinner(screened[i], full[i], i);
      // A logit that was left out keeps its first-plane value. If one of those
      // were the largest of the first plane, the second decided.
      size_t completed = 0;
      for (size_t t = 0; t < kVocab; ++t) {
        completed += screened[i][t] == full[i][t];
      }
      decided += completed > kRowGroup && completed < kVocab;
    }
  }
  EXPECT_GT(decided, 20u);
}

TEST(OutputHeadEdgeTest, NumbersThatAreNoneChangeNothing) {
  Head head(TensorType::kQ8_0);
  auto x = RandomRows(12, 5);
  x[2][7] = std::numeric_limits<float>::quiet_NaN();
  x[5][9] = std::numeric_limits<float>::infinity();
  x[8].assign(kHidden, 0.0f);
  const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
  const auto screened = head.Compute(x, std::vector<bool>(x.size(), true));
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(ArgMax(screened[i].data(), kVocab).id,
              ArgMax(full[i].data(), kVocab).id)
        << "row " << i;
  }
}

// Caps that leave logits as they are nearly, that bring many together, and that
// make most of them one number, of which the first is the winner.
TEST(OutputHeadEdgeTest, WinnersUnderASoftCap) {
  for (const float cap : {3000.0f, 300.0f, 30.0f, 5.0f, 0.5f}) {
    SCOPED_TRACE(cap);
    Head head(TensorType::kQ8_0, cap);
    bool differs = false;
    for (uint32_t seed = 0; seed < 12; ++seed) {
      const auto x = RandomRows(16, seed);
      const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
      const auto screened = head.Compute(x, std::vector<bool>(x.size(), true));
      for (size_t i = 0; i < x.size(); ++i) {
        ExpectSameWinner(screened[i], full[i], i);
      }
      differs |= screened != full;
    }
    EXPECT_TRUE(differs);  // else nothing was left out
  }
}

// Logits far below zero: the cap makes all of them its negative.
TEST(OutputHeadEdgeTest, WinnersUnderASoftCapFarBelowZero) {
  Head head(TensorType::kQ8_0, 0.001f);
  auto x = RandomRows(16, 6);
  for (auto& row : x) {
    for (float& value : row) value = -std::abs(value);
  }
  const auto full = head.Compute(x, std::vector<bool>(x.size(), false));
  const auto screened = head.Compute(x, std::vector<bool>(x.size(), true));
  for (size_t i = 0; i < x.size(); ++i) {
    ExpectSameWinner(screened[i], full[i], i);
  }
}

TEST(OutputHeadEdgeTest, ThreadsAndTargetsDoNotMatter) {
  const auto x = RandomRows(16, 7);
  const std::vector<bool> all(x.size(), true);
  Head one(TensorType::kQ8_0, 0, 3, 1), five(TensorType::kQ8_0, 0, 3, 5);
  EXPECT_EQ(one.Compute(x, all), five.Compute(x, all));
}

TEST(OutputHeadEdgeTest, NoRows) {
  Head head(TensorType::kQ8_0);
  EXPECT_TRUE(head.Compute({}, {}).empty());
}

}  // namespace
}  // namespace gkv
