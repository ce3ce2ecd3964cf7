#include "engine/lookup_drafter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

constexpr std::array<double, 7> kFree = {};

// Of the n-gram that ends `text`: where it stood last before.
size_t LastBefore(const Tokens& text, size_t n, size_t indexed_end) {
  if (text.size() < n) return 0;
  for (size_t end = std::min(text.size() - 1, indexed_end); end >= n; --end) {
    if (std::equal(text.end() - static_cast<ptrdiff_t>(n), text.end(),
                   text.begin() + static_cast<ptrdiff_t>(end - n))) {
      return end;
    }
  }
  return 0;
}

Tokens RandomText(size_t size, int32_t vocab, uint32_t seed) {
  std::mt19937 rng(seed);
  Tokens text(size);
  for (int32_t& t : text) t = static_cast<int32_t>(rng()) & (vocab - 1);
  return text;
}

TEST(NgramIndexTest, FindsWhatASearchOfTheWholeTextFinds) {
  for (const size_t n : {1, 2, 3, 4, 8}) {
    for (const int32_t vocab : {1, 2, 8, 64}) {
      const Tokens all = RandomText(700, vocab, 3);
      NgramIndex index(n);
      size_t found = 0;
      for (size_t size = 1; size <= all.size(); ++size) {
        const Tokens text(all.begin(),
                          all.begin() + static_cast<ptrdiff_t>(size));
        index.Update(text, 1000);
        const size_t end = index.Find(text);
        ASSERT_EQ(end, LastBefore(text, n, size)) << n << " " << vocab;
        found += end > 0;
      }
      if (vocab <= 2) {
        EXPECT_GT(found, 0u);
      }
    }
  }
}

TEST(NgramIndexTest, IndexesALongTextInParts) {
  const Tokens text = RandomText(5000, 16, 5);
  NgramIndex index(3);
  EXPECT_EQ(index.Find(text), 0u);
  for (size_t done = 3; done < text.size() + 400; done += 400) {
    index.Update(text, 400);
    // n-grams that end before 3 + 400 * calls are known.
    ASSERT_EQ(index.Find(text), LastBefore(text, 3, done + 399));
  }
}

// Feeds `text` from `begin` on, taking the drafter's guesses as far as they are
// right, as a scheduler does.
struct Outcome {
  size_t steps = 0, drafted = 0, accepted = 0;
};
Outcome Feed(Drafter& drafter, const Tokens& text, size_t begin,
             const DraftPrice& price, size_t most = 7) {
  Outcome outcome;
  size_t seen = 0;
  Tokens guesses(most);
  while (begin < text.size()) {
    const std::span added(text.data() + seen, begin - seen);
    std::fill(guesses.begin(), guesses.end(), -1);
    const size_t count = drafter.Propose(added, price, guesses);
    seen = begin;
    EXPECT_LE(count, most);
    ++outcome.steps;
    outcome.drafted += count;
    for (size_t i = 0; i < count; ++i) EXPECT_GE(guesses[i], 0);
    size_t right = 0;
    while (right < count && begin + right + 1 < text.size() &&
           guesses[right] == text[begin + right]) {
      ++right;
    }
    outcome.accepted += right;
    begin += right + 1;
  }
  return outcome;
}

TEST(LookupDrafterTest, GuessesWhatIsQuoted) {
  const Tokens document = RandomText(300, 1 << 16, 1);
  Tokens text = document;
  text.insert(text.end(), document.begin(), document.end());
  LookupDrafter drafter;
  const Outcome outcome = Feed(drafter, text, 303, {1, kFree});
  EXPECT_LE(outcome.steps, 297 / 8 + 4u);
  EXPECT_GE(outcome.accepted, 250u);
}

TEST(LookupDrafterTest, GoesOnWithAPeriod) {
  for (const size_t period : {1, 2, 3, 5}) {
    Tokens text;
    for (size_t i = 0; i < 200; ++i) {
      text.push_back(static_cast<int32_t>(i % period));
    }
    LookupDrafter drafter;
    const Outcome outcome = Feed(drafter, text, 12, {1, kFree});
    EXPECT_LE(outcome.steps, 30u) << period;
  }
}

TEST(LookupDrafterTest, PrefersTheLongestMatch) {
  // Behind 1 2 comes 9 lastly; behind 5 6 7 8 1 2 came 3.
  const Tokens text = {5, 6, 7, 8, 1, 2, 3, 4, 0, 1,
                       2, 9, 9, 0, 5, 6, 7, 8, 1, 2};
  LookupDrafter drafter;
  Tokens guesses(2);
  ASSERT_EQ(drafter.Propose(text, {1, kFree}, guesses), 2u);
  EXPECT_EQ(guesses, (Tokens{3, 4}));
}

TEST(LookupDrafterTest, NothingWhereNothingRepeatsOrGuessesAreDear) {
  Tokens text(2000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  LookupDrafter fresh;
  EXPECT_EQ(Feed(fresh, text, 1, {1, kFree}).drafted, 0u);
  const Tokens same(500, 7);
  const std::array<double, 7> dear = {1, 2, 3, 4, 5, 6, 7};
  LookupDrafter poor, busy, without_room;
  EXPECT_EQ(Feed(poor, same, 3, {1, dear}).drafted, 0u);
  EXPECT_EQ(Feed(busy, same, 3, {1, {}}).drafted, 0u);
  EXPECT_EQ(Feed(without_room, same, 3, {1, kFree}, 0).drafted, 0u);
}

// Bigrams recur, and what follows them is by chance: it stops, and begins
// again where the text begins to repeat.
TEST(LookupDrafterTest, StopsAndBeginsAgain) {
  const std::array<double, 7> price = {0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1};
  Tokens text = RandomText(3000, 16, 4);
  LookupDrafter drafter;
  const Outcome chance = Feed(drafter, text, 10, {1, price});
  EXPECT_LT(chance.drafted, 60u);
  const size_t begin = text.size();
  for (size_t i = 0; i < 400; ++i) text.push_back(text[500 + i]);
  LookupDrafter again;
  const Outcome outcome = Feed(again, text, 10, {1, price});
  EXPECT_LE(outcome.steps, begin - 10 + 400 / 2) << "twice as fast there";
}

// Beside many others a guess brings less for the same time.
TEST(LookupDrafterTest, GuessesLessBesideOthers) {
  const std::array<double, 7> price = {0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35};
  const Tokens text = RandomText(3000, 4, 4);
  LookupDrafter alone, among;
  const Outcome a = Feed(alone, text, 10, {1, price});
  const Outcome b = Feed(among, text, 10, {16, price});
  EXPECT_GT(a.drafted, 10 * b.drafted + 10);
}

}  // namespace
}  // namespace gkv
