#include "engine/parallel_logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace gkv {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Normal(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

constexpr size_t kSizes[] = {1, 97, 16384, 16385, 50000, 262144};

TEST(ParallelLogitsTest, ArgMaxIsThatOfTheWholeRow) {
  ThreadPool two(2), five(5);
  for (const size_t size : kSizes) {
    std::vector<float> x = Normal(size, static_cast<uint32_t>(size));
    const auto expect_same = [&] {
      const ScoredToken whole = ArgMax(x.data(), x.size());
      for (ThreadPool* pool :
           {static_cast<ThreadPool*>(nullptr), &two, &five}) {
        const ScoredToken found = ArgMax(x, pool);
        EXPECT_EQ(found.id, whole.id) << size;
        EXPECT_EQ(found.logit, whole.logit) << size;
      }
    };
    expect_same();
    x[size - 1] = 100;
    expect_same();
    x[size / 2] = 100;  // equals: the first wins
    expect_same();
    x[0] = kNaN;
    expect_same();
    std::fill(x.begin(), x.end(), -0.0f);
    x[size / 3] = 0.0f;  // equal to the others
    expect_same();
    std::fill(x.begin(), x.end(), -kInf);
    expect_same();
    EXPECT_EQ(ArgMax(x, &two).id, -1);
    x[size - 1] = kInf;
    expect_same();
  }
}

TEST(ParallelLogitsTest, SumsAreTheSameBitsWithAnyNumberOfThreads) {
  ThreadPool two(2), five(5);
  for (const size_t size : kSizes) {
    const std::vector<float> x = Normal(size, static_cast<uint32_t>(size));
    const float max = *std::max_element(x.begin(), x.end());
    std::vector<double> whole((size + kExpSumPartition - 1) / kExpSumPartition);
    ExpSums(x.data(), max, 1.25f, size, whole.data());
    EXPECT_GE(*std::max_element(whole.begin(), whole.end()), 1);
    for (ThreadPool* pool : {static_cast<ThreadPool*>(nullptr), &two, &five}) {
      EXPECT_EQ(ExpSums(x, max, 1.25f, pool), whole) << size;
    }
  }
}

}  // namespace
}  // namespace gkv
