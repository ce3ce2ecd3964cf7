#include "padded/padded_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace gkv {
namespace {

constexpr size_t kHeads = 2;
constexpr size_t kDim = 5;  // not a multiple of anything
constexpr size_t kTokenFloats = kHeads * kDim;

std::shared_ptr<BlockPool> PoisonedPool() {
  auto pool = BlockPool::Create();
  pool->set_poison(true);
  return pool;
}

PaddedShape Shape(size_t batch, size_t capacity, size_t window) {
  return {batch, capacity, window, kHeads, kDim, KvDtype::kF32};
}

// [columns of every row]: a number that no other place has.
std::vector<float> Numbers(size_t batch, size_t columns, float from) {
  std::vector<float> values(batch * columns * kTokenFloats);
  std::iota(values.begin(), values.end(), from);
  return values;
}

std::vector<float> Negated(std::vector<float> values) {
  for (float& value : values) value = -value;
  return values;
}

void Append(PaddedCache& cache, const std::vector<float>& k,
            std::vector<size_t> pads = {}) {
  const size_t columns = k.size() / kTokenFloats / cache.shape().batch;
  cache.Append(k.data(), Negated(k).data(), columns, pads);
}

TEST(PaddedCacheTest, KeepsTheOrderAndTheNumbers) {
  PaddedCache cache(Shape(1, 40, 0), PoisonedPool());
  const std::vector<float> k = Numbers(1, 33, 1);
  Append(cache, k);
  EXPECT_EQ(cache.Keys().slots, 33u);
  EXPECT_EQ(cache.Keys().data, k);
  EXPECT_EQ(cache.Values().data, Negated(k));
}

TEST(PaddedCacheTest, WrappingEqualsOneTokenAtATime) {
  for (const size_t capacity : {1, 2, 3, 4, 15, 16, 17, 33}) {
    for (size_t before = 0; before <= 2 * capacity; ++before) {
      for (const size_t n : {size_t{1}, size_t{2}, capacity - 1, capacity,
                             capacity + 1, 3 * capacity + 5}) {
        PaddedCache once(Shape(1, capacity, capacity), PoisonedPool());
        PaddedCache singly(Shape(1, capacity, capacity), PoisonedPool());
        const std::vector<float> k = Numbers(1, before + n, 1);
        const auto at = static_cast<ptrdiff_t>(before * kTokenFloats);
        Append(once, {k.begin(), k.begin() + at});
        Append(once, {k.begin() + at, k.end()});
        for (size_t i = 0; i < before + n; ++i) {
          const auto from =
              k.begin() + static_cast<ptrdiff_t>(i * kTokenFloats);
          Append(singly, {from, from + kTokenFloats});
        }
        const size_t held = std::min(capacity, before + n);
        const std::vector<float> expected(
            k.end() - static_cast<ptrdiff_t>(held * kTokenFloats), k.end());
        ASSERT_EQ(once.Keys().data, expected)
            << capacity << ' ' << before << ' ' << n;
        ASSERT_EQ(singly.Keys().data, expected);
        ASSERT_EQ(once.Values().data, singly.Values().data);
        ASSERT_EQ(once.positions(), singly.positions());
      }
    }
  }
}

TEST(PaddedCacheTest, RowsHaveLengthsOfTheirOwn) {
  PaddedCache cache(Shape(3, 8, 0), PoisonedPool());
  const std::vector<float> k = Numbers(3, 4, 1);
  Append(cache, k, {0, 3, 4});
  EXPECT_EQ(cache.lengths(), (std::vector<size_t>{4, 1, 0}));
  const PaddedCache::Slots keys = cache.Keys();
  ASSERT_EQ(keys.slots, 4u);
  // Row 1: its only token in slot 0, zeros behind it.
  const float* row = keys.data.data() + 4 * kTokenFloats;
  EXPECT_EQ(row[0], k[7 * kTokenFloats]);
  for (size_t i = kTokenFloats; i < 8 * kTokenFloats; ++i) {
    EXPECT_EQ(row[i], 0.0f) << i;
  }
  Append(cache, Numbers(3, 2, 1000), {1, 0, 2});
  EXPECT_EQ(cache.lengths(), (std::vector<size_t>{5, 3, 0}));
}

TEST(PaddedCacheTest, LinearOverflowLeavesEverythingAsItWas) {
  const auto pool = PoisonedPool();
  PaddedCache cache(Shape(2, 20, 0), pool);
  Append(cache, Numbers(2, 16, 1), {5, 0});
  const std::vector<float> keys = cache.Keys().data;
  const size_t blocks = pool->blocks_in_use();
  // Row 0 has room, row 1 has not.
  EXPECT_THROW(Append(cache, Numbers(2, 5, 500)), CacheFull);
  EXPECT_EQ(cache.Keys().data, keys);
  EXPECT_EQ(cache.lengths(), (std::vector<size_t>{11, 16}));
  EXPECT_EQ(pool->blocks_in_use(), blocks);
  Append(cache, Numbers(2, 5, 500), {0, 1});
  EXPECT_EQ(cache.lengths(), (std::vector<size_t>{16, 20}));
}

TEST(PaddedCacheTest, AFullPoolLeavesEverythingAsItWas) {
  const auto pool = PoisonedPool();
  PaddedCache cache(Shape(2, 100, 100), pool);
  Append(cache, Numbers(2, 10, 1));
  const std::vector<float> keys = cache.Keys().data;
  for (size_t n = 1; n <= 4; ++n) {
    pool->FailAfter(n);
    EXPECT_THROW(Append(cache, Numbers(2, 40, 500)), CacheFull);
    pool->FailAfter(0);
    EXPECT_EQ(cache.Keys().data, keys);
    EXPECT_EQ(cache.lengths(), (std::vector<size_t>{10, 10}));
    EXPECT_EQ(pool->blocks_in_use(), 2u);
    EXPECT_EQ(cache.CausalMask(10).slots, 10u);
    EXPECT_THROW(cache.CausalMask(11), InvalidArgument);
  }
}

TEST(PaddedCacheTest, BlocksFollowTheContentAndGoBack) {
  const auto pool = PoisonedPool();
  {
    PaddedCache cache(Shape(2, 1000, 0), pool);
    EXPECT_EQ(cache.nbytes(), 0u);
    Append(cache, Numbers(2, 17, 1));
    EXPECT_EQ(pool->blocks_in_use(), 4u);
    EXPECT_EQ(cache.nbytes(), pool->bytes_in_use());
    cache.Reset();
    EXPECT_EQ(pool->blocks_in_use(), 0u);
    EXPECT_EQ(cache.Keys().slots, 0u);
    EXPECT_THROW(cache.CausalMask(1), InvalidArgument);
    Append(cache, Numbers(2, 1, 1));
  }
  EXPECT_EQ(pool->blocks_in_use(), 0u);
}

// Every (calls, window, capacity, q_len) against positions written out.
TEST(PaddedCacheTest, MasksFollowPositions) {
  for (const size_t capacity : {1, 4, 17}) {
    for (size_t window = 0; window <= capacity; ++window) {
      PaddedCache cache(Shape(1, window == 0 ? 64 : capacity, window));
      std::vector<int> columns;  // position, or -1 for a pad
      int next = 0;
      for (const auto& [pads, tokens] :
           {std::pair{2, 1}, {0, 3}, {3, 0}, {0, 1}, {1, 4}, {0, 9}}) {
        Append(cache, Numbers(1, static_cast<size_t>(pads + tokens), 1),
               {static_cast<size_t>(pads)});
        columns.insert(columns.end(), static_cast<size_t>(pads), -1);
        for (int i = 0; i < tokens; ++i) columns.push_back(next++);
        const int held = static_cast<int>(cache.lengths()[0]);
        for (size_t q_len = 1; q_len <= columns.size(); ++q_len) {
          const PaddedCache::Mask mask = cache.CausalMask(q_len);
          ASSERT_EQ(mask.slots, static_cast<size_t>(held));
          for (size_t i = 0; i < q_len; ++i) {
            const int query = columns[columns.size() - q_len + i];
            for (int slot = 0; slot < held; ++slot) {
              const int position = next - held + slot;
              const bool sees =
                  query >= 0 && position <= query &&
                  (window == 0 || position > query - static_cast<int>(window));
              ASSERT_EQ(mask.data[i * mask.slots + static_cast<size_t>(slot)],
                        sees)
                  << "window " << window << " q_len " << q_len << " query " << i
                  << " slot " << slot;
            }
          }
        }
      }
    }
  }
}

TEST(PaddedCacheTest, BadSizesAreNamed) {
  const auto make = [](PaddedShape shape) { PaddedCache cache(shape); };
  EXPECT_THROW(make({0, 1, 0, 1, 1, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 0, 0, 1, 1, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 1, 2, 1, 1, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 1, 0, 0, 1, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 1, 0, 1, 0, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 1, 0, 1, 513, KvDtype::kF32}), InvalidArgument);
  EXPECT_THROW(make({1, 1, 0, 1, 1, KvDtype::kInt8}), InvalidArgument);
  EXPECT_THROW(make({1, size_t{1} << 60, 0, 1, 1, KvDtype::kF32}),
               InvalidArgument);
}

}  // namespace
}  // namespace gkv
