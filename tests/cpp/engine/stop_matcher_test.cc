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

TEST(StopMatcherTest, AStopOfAReplyBeginsAfterTheSpaceBeforeIt) {
  StopMatcher matcher({}, {" "});
  EXPECT_EQ(matcher.Push(" "), " ");
  EXPECT_EQ(matcher.Push("\n\t"), "\n\t");
  EXPECT_EQ(matcher.Push(" Hi"), " Hi");
  EXPECT_FALSE(matcher.stopped());
  EXPECT_EQ(matcher.Push(" you"), "");
  EXPECT_TRUE(matcher.stopped());

  StopMatcher across({}, {" a"});  // begins in the space, ends after it
  EXPECT_EQ(across.Push(" "), " ");
  EXPECT_EQ(across.Push("ab a"), "ab");
  EXPECT_TRUE(across.stopped());
}

TEST(StopMatcherTest, OtherStopsAreLookedForInTheSpaceToo) {
  StopMatcher matcher({"\nUser:"}, {"\n", "User"});
  EXPECT_EQ(matcher.Push(" \n"), " ");
  EXPECT_EQ(matcher.Push("User"), "\n");
  EXPECT_TRUE(matcher.stopped());

  StopMatcher other({"\nUser:"}, {"\n"});
  EXPECT_EQ(other.Push("\nUser"), "");
  EXPECT_EQ(other.Push("x\n"), "\nUserx");
  EXPECT_TRUE(other.stopped());
}

TEST(StopMatcherTest, SpaceIsThatOfUnicodeInAnyPieces) {
  for (const std::string space :
       {"\xC2\x85", "\xC2\xA0", "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x8A",
        "\xE2\x80\xA8", "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F",
        "\xE3\x80\x80", "\x1C", "\r", " "}) {
    StopMatcher matcher({}, {space, "x"});
    std::string out;
    for (const char byte : space + " " + space) out += matcher.Push({&byte, 1});
    EXPECT_FALSE(matcher.stopped());
    EXPECT_EQ(matcher.Push("a" + space), "a");
    EXPECT_EQ(out, space + " " + space);
    EXPECT_TRUE(matcher.stopped());

    StopMatcher other({}, {"\n"});  // no stop begins as the space does
    out = "";
    for (const char byte : space + "\na") out += other.Push({&byte, 1});
    EXPECT_FALSE(other.stopped());
    EXPECT_EQ(out, space + "\na");
    EXPECT_EQ(other.Push("\n"), "");
    EXPECT_TRUE(other.stopped());
  }
  // What is no white space, or only begins as some.
  for (const std::string text : {"\xE2\x80\x8B", "\xE2\x80\x93", "\xC2\xA1"}) {
    StopMatcher matcher({}, {text});
    for (const char byte : text) EXPECT_EQ(matcher.Push({&byte, 1}), "");
    EXPECT_TRUE(matcher.stopped());
  }
  StopMatcher cut({}, {"x"});
  const std::string begun = cut.Push("\xE2\x80");
  EXPECT_EQ(begun + cut.Flush(), "\xE2\x80");
}

TEST(StopMatcherTest, AReplyIsSearchedAsTheTextWithoutItsSpace) {
  std::mt19937 rng(2);
  for (int round = 0; round < 3000; ++round) {
    const auto random_text = [&](size_t size) {
      std::string text;
      while (text.size() < size) text += "ab \n"[rng() % 4];
      return text;
    };
    std::vector<std::string> stops;
    for (size_t i = 0; i < 1 + rng() % 3; ++i) {
      stops.push_back(random_text(1 + rng() % 4));
    }
    const std::string text = random_text(rng() % 30);
    const size_t begin = std::min(text.find_first_not_of(" \n"), text.size());
    StopMatcher matcher({}, stops);
    StopMatcher expected(stops);
    std::string out;
    std::string wanted = text.substr(0, begin);
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min(1 + rng() % 4, text.size() - at);
      out += matcher.Push(text.substr(at, size));
      const size_t from = std::max(at, begin);
      at += size;
      if (from < at) wanted += expected.Push(text.substr(from, at - from));
    }
    EXPECT_EQ(matcher.stopped(), expected.stopped());
    EXPECT_EQ(out + matcher.Flush(), wanted + expected.Flush());
  }
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
