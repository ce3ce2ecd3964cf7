#include "engine/lookup_drafter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "engine/guess_plan.h"

namespace gkv {
namespace {

using Tokens = std::vector<int32_t>;

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

// Guesses that pay at such a price, for one that decodes among so many.
struct Price {
  size_t tokens = 1;
  double each = 0;  // of a step without guesses
};

// Feeds `text` from `begin` on, taking the drafter's guesses as far as they are
// right, as a scheduler does.
struct Outcome {
  size_t steps = 0, drafted = 0, accepted = 0;
};
Outcome Feed(Drafter& drafter, const Tokens& text, size_t begin,
             const Price& price = {}, size_t most = 7) {
  Outcome outcome;
  size_t seen = 0;
  std::vector<double> extra(most);
  for (size_t i = 0; i < most; ++i) {
    extra[i] = price.each * static_cast<double>(i + 1);
  }
  std::vector<DraftGuess> guesses(most);
  while (begin < text.size()) {
    const std::span added(text.data() + seen, begin - seen);
    guesses.assign(most, {-1, -1});
    const size_t proposed = drafter.Propose(added, guesses);
    EXPECT_LE(proposed, most);
    for (size_t i = 0; i < proposed; ++i) {
      EXPECT_GE(guesses[i].id, 0);
      EXPECT_GE(guesses[i].right, 0);
      EXPECT_LE(guesses[i].right, 1);
    }
    const GuessOffer all{.known = {guesses.data(), proposed}};
    const size_t count =
        PlanGuesses({&all, 1}, {price.tokens, 1, extra}).guesses[0];
    seen = begin;
    ++outcome.steps;
    outcome.drafted += count;
    size_t right = 0;
    while (right < count && begin + right + 1 < text.size() &&
           guesses[right].id == text[begin + right]) {
      ++right;
    }
    outcome.accepted += right;
    begin += right + 1;
  }
  drafter.End(std::span(text).subspan(seen));
  return outcome;
}

TEST(LookupDrafterTest, GuessesWhatIsQuoted) {
  const Tokens document = RandomText(300, 1 << 16, 1);
  Tokens text = document;
  text.insert(text.end(), document.begin(), document.end());
  LookupDrafter drafter;
  const Outcome outcome = Feed(drafter, text, 303);
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
    const Outcome outcome = Feed(drafter, text, 12);
    EXPECT_LE(outcome.steps, 30u) << period;
  }
}

TEST(LookupDrafterTest, PrefersTheLongestMatch) {
  // Behind 1 2 comes 9 lastly; behind 5 6 7 8 1 2 came 3.
  const Tokens text = {5, 6, 7, 8, 1, 2, 3, 4, 0, 1,
                       2, 9, 9, 0, 5, 6, 7, 8, 1, 2};
  LookupDrafter drafter;
  std::vector<DraftGuess> guesses(2);
  ASSERT_EQ(drafter.Propose(text, guesses), 2u);
  EXPECT_EQ(guesses[0].id, 3);
  EXPECT_EQ(guesses[1].id, 4);
}

TEST(LookupDrafterTest, NothingWhereNothingRepeatsOrGuessesAreDear) {
  Tokens text(2000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<int32_t>(i);
  LookupDrafter fresh;
  EXPECT_EQ(Feed(fresh, text, 1).drafted, 0u);
  const Tokens same(500, 7);
  LookupDrafter poor, without_room;
  EXPECT_EQ(Feed(poor, same, 3, {1, 1}).drafted, 0u);
  EXPECT_EQ(Feed(without_room, same, 3, {}, 0).drafted, 0u);
}

// Bigrams recur, and what follows them is by chance: it stops, and begins
// again where the text begins to repeat.
TEST(LookupDrafterTest, StopsAndBeginsAgain) {
  const Price price = {1, 0.3};
  Tokens text = RandomText(3000, 16, 4);
  LookupDrafter drafter;
  const Outcome chance = Feed(drafter, text, 10, price);
  EXPECT_LT(chance.drafted, 60u);
  const size_t begin = text.size();
  for (size_t i = 0; i < 400; ++i) text.push_back(text[500 + i]);
  LookupDrafter again;
  const Outcome outcome = Feed(again, text, 10, price);
  EXPECT_LE(outcome.steps, begin - 10 + 400 / 2) << "twice as fast there";
}

// Beside many others a guess brings less for the same time.
TEST(LookupDrafterTest, GuessesLessBesideOthers) {
  const Tokens text = RandomText(3000, 4, 4);
  LookupDrafter alone, among;
  const Outcome a = Feed(alone, text, 10, {1, 0.05});
  const Outcome b = Feed(among, text, 10, {16, 0.05});
  EXPECT_GT(a.drafted, 10 * b.drafted + 10);
}

// A long prompt is taken in while it is read, or in portions.
TEST(LookupDrafterTest, KnowsAPromptThatItRead) {
  Tokens text = RandomText(3000, 1 << 16, 1);
  text.insert(text.end(), text.begin() + 1000, text.begin() + 1300);
  for (const bool reads : {false, true}) {
    LookupDrafter drafter;
    if (reads) {
      drafter.Read(std::span(text).first(3000), 0);
      drafter.Read({}, 0);
      drafter.Read({}, 0);
    }
    std::vector<DraftGuess> guesses(4);
    size_t steps = 0, count = 0;
    for (size_t at = reads ? 3000 : 0; count == 0 && at + 16 < text.size();
         ++steps) {
      const size_t end = std::max<size_t>(at, 3000) + 4;
      count = drafter.Propose(std::span(text).subspan(at, end - at), guesses);
      at = end;
    }
    EXPECT_GT(count, 0u);
    EXPECT_EQ(reads, steps == 1) << steps;
  }
}

// ---- Other requests of the tenant ----

class SharedLookupTest : public ::testing::Test {
 protected:
  std::unique_ptr<LookupDrafter> New(bool reads = true, bool writes = true) {
    return std::make_unique<LookupDrafter>(
        LookupDrafter::Sharing{history_, reads, writes});
  }

  std::shared_ptr<LookupHistory> history_ = std::make_shared<LookupHistory>();
};

Tokens Joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_F(SharedLookupTest, ASiblingSaysWhatAnotherSaid) {
  const Tokens reply = RandomText(300, 1 << 16, 1);
  const Tokens first = Joined(RandomText(50, 1 << 16, 2), reply);
  const Tokens second = Joined(RandomText(40, 1 << 16, 3), reply);
  EXPECT_EQ(Feed(*New(), first, 50).accepted, 0u);
  const Outcome again = Feed(*New(), second, 44);
  EXPECT_GT(again.accepted, 240u);
  LookupDrafter alone;
  EXPECT_EQ(Feed(alone, second, 44).accepted, 0u);
}

TEST_F(SharedLookupTest, WhatModesAllow) {
  const Tokens text = RandomText(300, 1 << 16, 1);
  Feed(*New(true, false), text, 50);  // leaves nothing
  EXPECT_EQ(history_->tokens(), 0u);
  EXPECT_EQ(Feed(*New(), text, 50).accepted, 0u);
  EXPECT_EQ(Feed(*New(false, true), text, 50).accepted, 0u);  // takes nothing
  EXPECT_GT(Feed(*New(true, false), text, 50).accepted, 200u);
}

// A fork goes on behind a prefix that was read before: what another fork said
// there is known, the prefix itself is kept once.
TEST_F(SharedLookupTest, AForkSaysWhatAnotherSaid) {
  const Tokens prefix = RandomText(400, 1 << 16, 1);
  const Tokens reply = RandomText(200, 1 << 16, 2);
  const Tokens text = Joined(prefix, reply);
  for (const bool again : {false, true}) {
    const auto drafter = New();
    drafter->Read(prefix, 400);
    // From where it has read on.
    std::vector<DraftGuess> guesses(7);
    size_t at = 400, seen = 400, steps = 0;
    while (at < text.size()) {
      const size_t count = drafter->Propose(
          std::span(text).subspan(seen, at - seen), guesses);
      seen = at;
      size_t right = 0;
      while (right < count && at + right + 1 < text.size() &&
             guesses[right].id == text[at + right]) {
        ++right;
      }
      at += right + 1;
      ++steps;
    }
    drafter->End(std::span(text).subspan(seen));
    if (again) {
      EXPECT_LE(steps, 200 / 8 + 3u);
    } else {
      EXPECT_EQ(steps, 200u);
      EXPECT_EQ(history_->tokens(), 32 + 200u);
    }
  }
}

// Both run at the same time, one a little behind.
TEST_F(SharedLookupTest, ARunningSiblingIsRead) {
  const Tokens text = RandomText(200, 1 << 16, 1);
  const auto first = New(), second = New();
  std::vector<DraftGuess> guesses(7);
  size_t known = 0;
  first->Propose(std::span(text).first(40), guesses);
  for (size_t at = 40; at + 1 < text.size(); ++at) {
    first->Propose(std::span(text).subspan(at, 1), guesses);
    const std::span<const int32_t> added =
        at == 40 ? std::span(text).first(11)
                 : std::span(text).subspan(at - 30, 1);
    const size_t count = second->Propose(added, guesses);
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(guesses[i].id, text[at - 29 + i]);
    }
    known += count > 0;
  }
  EXPECT_GT(known, 150u);
}

// What was learned from one is what the next begins with.
TEST_F(SharedLookupTest, SharesAreLearnedOverRequests) {
  const Tokens text = RandomText(3000, 16, 4);
  const auto priced = [&] { return Feed(*New(false), text, 10, {1, 0.05}); };
  (void)priced();
  LookupShares& learned = history_->shares();
  EXPECT_LT(learned.Right(LookupShares::Source::kOwn, 3), 0.1);
}

// A text longer than what a history keeps of one goes on in another.
TEST_F(SharedLookupTest, ALongTextGoesOn) {
  const Tokens text = RandomText(LookupHistory::kMaxTokens, 1 << 16, 6);
  const auto drafter = New();
  drafter->Read(text, 0);
  for (int i = 0; i < 100; ++i) drafter->Read({}, 0);
  drafter->End({});
  EXPECT_LE(history_->tokens(), LookupHistory::kMaxTokens);
  const auto [place, length] =
      history_->Find(std::span(text).first(text.size() - 100));
  EXPECT_EQ(length, 32u);
  EXPECT_EQ(history_->From(place).size(), 100u);
}

}  // namespace
}  // namespace gkv
