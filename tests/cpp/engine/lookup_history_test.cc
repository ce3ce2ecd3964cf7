#include "engine/lookup_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;
using Source = LookupShares::Source;

Tokens RandomText(size_t size, uint32_t seed, uint32_t vocab = 1u << 18) {
  std::mt19937 rng(seed);
  Tokens text(size);
  for (int32_t& t : text) t = static_cast<int32_t>(rng() % vocab);
  return text;
}

std::span<const int32_t> First(const Tokens& text, size_t count) {
  return std::span(text).first(count);
}

TEST(LookupHistoryTest, FindsWhatStoodBehindTheLastTokens) {
  LookupHistory history;
  EXPECT_EQ(history.Find(First({1, 2, 3, 4}, 4)).second, 0u);
  const Tokens text = RandomText(200, 1);
  const uint32_t number = history.Begin();
  for (size_t at = 0; at < text.size(); at += 7) {
    ASSERT_TRUE(history.Append(
        number, std::span(text).subspan(at, std::min<size_t>(
                                                7, text.size() - at))));
  }
  for (const size_t end : {4, 8, 60, 184}) {
    const auto [place, length] = history.Find(First(text, end));
    ASSERT_EQ(length, std::min<size_t>(end, 32)) << end;
    const auto follows = history.From(place);
    EXPECT_TRUE(std::equal(follows.begin(), follows.end(),
                           text.begin() + static_cast<ptrdiff_t>(end),
                           text.end()));
  }
  // Fewer than four tokens say too little, and what came last is not found
  // before there is something to go on with.
  EXPECT_EQ(history.Find(First(text, 3)).second, 0u);
  EXPECT_EQ(history.Find(First(text, 185)).second, 0u);
  history.End(number);
  EXPECT_EQ(history.Find(First(text, 199)).second, 32u);
}

TEST(LookupHistoryTest, AnEqualHashIsNoMatch) {
  LookupHistory history;
  const uint32_t number = history.Begin();
  // All places of the tables are taken, many times.
  for (uint32_t seed = 0; seed < 20; ++seed) {
    history.Append(number, RandomText(1500, seed));
  }
  for (uint32_t seed = 100; seed < 200; ++seed) {
    EXPECT_EQ(history.Find(RandomText(8, seed)).second, 0u);
  }
}

TEST(LookupHistoryTest, TheOldestGiveWay) {
  LookupHistory history;
  const Tokens old = RandomText(100, 1);
  const uint32_t first = history.Begin();
  history.Append(first, old);
  const auto [place, length] = history.Find(First(old, 50));
  ASSERT_EQ(length, 32u);
  uint32_t last = 0;
  for (uint32_t seed = 2; seed < 100; ++seed) {
    last = history.Begin();
    ASSERT_TRUE(history.Append(last, RandomText(1000, seed)));
    EXPECT_LE(history.tokens(), LookupHistory::kMaxTokens);
  }
  EXPECT_EQ(history.Find(First(old, 50)).second, 0u);
  EXPECT_TRUE(history.From(place).empty());
  EXPECT_EQ(history.MatchLength(place, First(old, 50)), 0u);
  EXPECT_FALSE(history.Append(first, old));
  history.End(first);
  EXPECT_EQ(history.Find(First(RandomText(1000, 99), 500)).second, 32u);
  // Short ones, too.
  const auto [kept, known] = history.Find(First(RandomText(1000, 99), 500));
  for (size_t i = 0; i < LookupHistory::kMaxTexts - 1; ++i) history.Begin();
  EXPECT_FALSE(history.From(kept).empty());
  history.Begin();
  EXPECT_TRUE(history.From(kept).empty());
  EXPECT_EQ(known, 32u);
}

TEST(LookupHistoryTest, ATextThatIsTooLongIsRefused) {
  LookupHistory history;
  const uint32_t number = history.Begin();
  const Tokens half(LookupHistory::kMaxTokens / 2, 5);
  EXPECT_TRUE(history.Append(number, half));
  EXPECT_FALSE(history.Append(number, First(half, 1)));
  EXPECT_EQ(history.tokens(), half.size());
}

TEST(LookupSharesTest, LearnsForEachLengthAndSource) {
  LookupShares shares;
  const LookupShares before = shares;
  for (int i = 0; i < 200; ++i) shares.Learn(Source::kOther, 9, true, 0.1);
  EXPECT_GT(shares.Right(Source::kOther, 12), 0.99);
  for (const size_t length : {2, 4, 6, 16, 30}) {
    EXPECT_EQ(shares.Right(Source::kOther, length),
              before.Right(Source::kOther, length));
    EXPECT_EQ(shares.Right(Source::kOwn, length),
              before.Right(Source::kOwn, length));
  }
  for (int i = 0; i < 200; ++i) shares.Learn(Source::kOther, 9, false, 0.1);
  EXPECT_LT(shares.Right(Source::kOther, 12), 0.01);
}

TEST(LookupHistoriesTest, OneForEachTenant) {
  LookupHistories histories;
  const auto tenant = [](size_t i) {
    Address address;
    address.bytes[0] = static_cast<uint8_t>(i);
    return address;
  };
  const auto first = histories.Of(tenant(0));
  EXPECT_EQ(histories.Of(tenant(0)), first);
  EXPECT_NE(histories.Of(tenant(1)), first);
  for (size_t i = 2; i < LookupHistories::kMaxTenants; ++i) {
    histories.Of(tenant(i));
  }
  const auto second = histories.Of(tenant(1));
  EXPECT_EQ(histories.Of(tenant(0)), first);
  histories.Of(tenant(LookupHistories::kMaxTenants));  // 2 goes
  EXPECT_EQ(histories.Of(tenant(0)), first);
  EXPECT_EQ(histories.Of(tenant(1)), second);
}

}  // namespace
}  // namespace gkv
