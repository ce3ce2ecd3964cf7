#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>

namespace gkv {
namespace {

using namespace std::string_view_literals;

TEST(OneLineTest, TextStaysAsItIs) {
  for (const std::string_view text :
       {""sv, "a b~"sv, "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"sv,
        "\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF\xC2\x80"sv}) {
    EXPECT_EQ(OneLine(text), text);
  }
}

TEST(OneLineTest, ControlCharactersAreEscaped) {
  EXPECT_EQ(OneLine("a\nb\r\t\0c\x7F\x1B[1m"sv),
            "a\\x0ab\\x0d\\x09\\x00c\\x7f\\x1b[1m");
}

TEST(OneLineTest, BytesThatAreNoUtf8AreEscaped) {
  EXPECT_EQ(OneLine("gemma\xB3"sv), "gemma\\xb3");
  EXPECT_EQ(OneLine("\xC3"sv), "\\xc3");
  EXPECT_EQ(OneLine("\xC0\xAF"sv), "\\xc0\\xaf");          // overlong
  EXPECT_EQ(OneLine("\xE0\x80\xAF"sv), "\\xe0\\x80\\xaf");  // overlong
  EXPECT_EQ(OneLine("\xED\xA0\x80"sv), "\\xed\\xa0\\x80");  // surrogate
  EXPECT_EQ(OneLine("\xF4\x90\x80\x80"sv), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(OneLine("\xE2\x82"
                    "a"sv),
            "\\xe2\\x82"
            "a");
}

TEST(ErrorTest, OfTheSystemNamesThePath) {
  const IoError error("a/b", ENOENT);
  EXPECT_STREQ(error.what(), "a/b: No such file or directory");
  EXPECT_EQ(error.error_number(), ENOENT);
  EXPECT_EQ(error.path(), "a/b");
}

template <class Kind>
class ErrorKindTest : public testing::Test {};

using Kinds = testing::Types<Error, InvalidArgument, CorruptFile, Mismatch,
                             CacheFull, Busy, QueueFull>;
TYPED_TEST_SUITE(ErrorKindTest, Kinds);

TYPED_TEST(ErrorKindTest, StaysWhatItIsWhenContinued) {
  const TypeParam error("no room");
  try {
    std::rethrow_exception(error.Continued("; try again"));
  } catch (const Error& continued) {
    EXPECT_EQ(typeid(continued), typeid(TypeParam));
    EXPECT_STREQ(continued.what(), "no room; try again");
  }
}

TEST(ErrorTest, OfTheSystemKeepsItsNumberWhenContinued) {
  const IoError error("a/b", ENOENT);
  try {
    std::rethrow_exception(error.Continued("; try again"));
  } catch (const IoError& continued) {
    EXPECT_STREQ(continued.what(), "a/b: No such file or directory; try again");
    EXPECT_EQ(continued.error_number(), ENOENT);
    EXPECT_EQ(continued.path(), "a/b");
  }
}

TEST(CheckRangeTest, NamesWhatWasFoundAndExpected) {
  CheckRange(1, 1, 3, "x");
  CheckRange(3, 1, 3, "x");
  for (const uint64_t value : {0, 4}) {
    try {
      CheckRange<CorruptFile>(value, 1, 3, "layer ", 7, ": width");
      ADD_FAILURE() << value;
    } catch (const CorruptFile& error) {
      EXPECT_EQ(error.what(),
                StrCat("layer 7: width: expected 1..3, found ", value));
    }
  }
  EXPECT_THROW(CheckRange(9, 0, 8, "x"), InvalidArgument);
}

TEST(ErrorTest, EveryMessageIsOneLineOfText) {
  EXPECT_STREQ(CorruptFile("tensor a\nb\xFF").what(), "tensor a\\x0ab\\xff");
  EXPECT_STREQ(IoError("x\n", 2, "p").what(), "x\\x0a");
}

}  // namespace
}  // namespace gkv
