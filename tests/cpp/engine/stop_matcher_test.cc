#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace gkv {
namespace {

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
    while (at < text.size() && !matcher.stopped()) {
      const size_t size = 1 + rng() % 4;
      out += matcher.Push(text.substr(at, size));
      at = std::min(text.size(), at + size);
      // What was given out never has to be taken back.
      for (const std::string& stop : stops) {
        EXPECT_EQ(out.find(stop), std::string::npos);
      }
    }
    // The matcher looks whenever a piece arrives, so a stop is found at the
    // earliest in the pieces up to then.
    size_t found = std::string::npos;
    for (const std::string& stop : stops) {
      found = std::min(found, text.substr(0, at).find(stop));
    }
    EXPECT_EQ(matcher.stopped(), found != std::string::npos);
    if (!matcher.stopped()) out += matcher.Flush();
    EXPECT_EQ(out, text.substr(0, std::min(found, text.size())));
  }
}

}  // namespace
}  // namespace gkv
