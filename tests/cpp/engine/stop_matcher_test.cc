#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace gkv {
namespace {

// The first occurrence that ends behind `passed` bytes.
size_t FindBehind(const std::string& text, const std::string& stop,
                  size_t passed) {
  size_t found = text.find(stop);
  while (found != std::string::npos && found + stop.size() <= passed) {
    found = text.find(stop, found + 1);
  }
  return found;
}

TEST(StopMatcherTest, PassesTextThroughWithoutStops) {
  StopMatcher matcher;
  EXPECT_EQ(matcher.Push("abc"), "abc");
  EXPECT_EQ(matcher.Push(""), "");
  EXPECT_EQ(matcher.Flush(), "");
  EXPECT_FALSE(matcher.stopped());
}

TEST(StopMatcherTest, HoldsBackWhatMayBecomeAStop) {
  StopMatcher matcher({"END"});
  EXPECT_EQ(matcher.Push("the E"), "the ");
  EXPECT_EQ(matcher.Push("N"), "");
  EXPECT_EQ(matcher.Push("T"), "ENT");
  EXPECT_EQ(matcher.Push("EN"), "");
  EXPECT_EQ(matcher.Flush(), "EN");
}

TEST(StopMatcherTest, CutsBeforeTheFirstOfSeveral) {
  StopMatcher matcher({"world", "lo w"});
  EXPECT_EQ(matcher.Push("hel"), "he");
  EXPECT_EQ(matcher.Push("lo world"), "l");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.Push("more"), "");
  EXPECT_EQ(matcher.Flush(), "");
}

TEST(StopMatcherTest, AStopThatIsCompleteTooEarlyIsText) {
  StopMatcher matcher({"END", "EN"});
  EXPECT_EQ(matcher.Push("a EN", false), "a ");
  EXPECT_EQ(matcher.Push("x"), "ENx");  // not the EN of before
  EXPECT_EQ(matcher.Push("y E", false), "y ");
  EXPECT_EQ(matcher.Push("N"), "");  // begun before
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcherTest, EqualsASearchOfTheWholeTextForAnyPieces) {
  std::mt19937 rng(1);
  for (int round = 0; round < 3000; ++round) {
    const auto random_text = [&](size_t size) {
      std::string text;
      while (text.size() < size) text += static_cast<char>('a' + rng() % 2);
      return text;
    };
    std::vector<std::string> stops;
    for (size_t i = 0; i < 1 + rng() % 3; ++i) {
      stops.push_back(random_text(1 + rng() % 6));
    }
    const std::string text = random_text(rng() % 30);
    StopMatcher matcher(stops);
    std::string out;
    size_t at = 0;
    size_t passed = 0;  // no stop within it counts
    const size_t may_stop_from = rng() % 2 * (rng() % 20);
    while (at < text.size() && !matcher.stopped()) {
      const size_t size = 1 + rng() % 4;
      const bool may_stop = at >= may_stop_from;
      out += matcher.Push(text.substr(at, size), may_stop);
      at = std::min(text.size(), at + size);
      if (!may_stop) passed = at;
      // What was given out never has to be taken back.
      for (const std::string& stop : stops) {
        EXPECT_EQ(FindBehind(out, stop, passed), std::string::npos);
      }
    }
    // The matcher looks whenever a piece arrives, so a stop is found at the
    // earliest in the pieces up to then.
    size_t found = std::string::npos;
    for (const std::string& stop : stops) {
      found = std::min(found, FindBehind(text.substr(0, at), stop, passed));
    }
    EXPECT_EQ(matcher.stopped(), found != std::string::npos);
    if (!matcher.stopped()) out += matcher.Flush();
    EXPECT_EQ(out, text.substr(0, std::min(found, text.size())));
  }
}

}  // namespace
}  // namespace gkv
