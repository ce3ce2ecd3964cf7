// Metadata of all types through the getters of GgufFile (cpp/io/gguf.h).

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "gtest/gtest.h"
#include "io/gguf.h"
#include "io/gguf_builder.h"

namespace gkv {
namespace {

constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
constexpr uint64_t kMax64 = std::numeric_limits<uint64_t>::max();

class GgufMetadataTest : public ::testing::Test {
 protected:
  // The message of the CorruptFile that `use` throws, without path and offset.
  static std::string Corruption(const std::function<void()>& use) {
    try {
      use();
    } catch (const CorruptFile& error) {
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with("x.gguf: offset ")) << message;
      return message.substr(message.find("metadata "));
    }
    return "no CorruptFile";
  }

  const std::vector<uint8_t> bytes_ =
      GgufBuilder()
          .Set("u8", uint8_t{200})
          .Set("i8", int8_t{-100})
          .Set("u16", uint16_t{60000})
          .Set("i16", int16_t{-30000})
          .Set("u32", uint32_t{4000000000})
          .Set("i32", int32_t{-2000000000})
          .Set("u64", kMax64)
          .Set("i64", kMin64)
          .Set("positive", int32_t{7})
          .Set("f32", 0.1f)
          .Set("f64", 0.1)
          .Set("yes", true)
          .Set("no", false)
          .Set("text",
               "Gr\xC3\xBC\xC3\x9F"
               "e\n")
          .Set("empty", "")
          .Set("strings", std::vector<std::string>{"a", "", "bc", "\xFF"})
          .Set("no strings", std::vector<std::string>{})
          .Set("floats", std::vector<float>{0.5f, -2})
          .Set("doubles", std::vector<double>{1e300})
          .Set("bytes", std::vector<uint8_t>{0, 255})
          .Set("i16s", std::vector<int16_t>{-1, 300})
          .Set("u64s", std::vector<uint64_t>{1, uint64_t{1} << 62})
          .Set("too big", std::vector<uint64_t>{1, kMax64})
          .Set("bools", std::vector<bool>{true, false, true})
          .Build();
  const GgufFile file_{bytes_, "x.gguf"};
};

TEST_F(GgufMetadataTest, KeysInFileOrder) {
  const std::vector<std::string> keys = file_.Keys();
  ASSERT_EQ(keys.size(), 24u);
  EXPECT_EQ(keys.front(), "u8");
  EXPECT_EQ(keys[13], "text");
  EXPECT_EQ(keys.back(), "bools");
  EXPECT_TRUE(file_.Has("no strings"));
  EXPECT_FALSE(file_.Has("u128"));
}

TEST_F(GgufMetadataTest, AbsentKeysAreNothing) {
  EXPECT_FALSE(file_.Get("x"));
  EXPECT_FALSE(file_.GetUint("x"));
  EXPECT_FALSE(file_.GetFloat("x"));
  EXPECT_FALSE(file_.GetBool("x"));
  EXPECT_FALSE(file_.GetString("x"));
  EXPECT_FALSE(file_.GetStrings("x"));
  EXPECT_FALSE(file_.GetFloats("x"));
  EXPECT_FALSE(file_.GetInts("x"));
}

TEST_F(GgufMetadataTest, IntegersOfEveryWidth) {
  EXPECT_EQ(file_.GetUint("u8"), 200u);
  EXPECT_EQ(file_.GetUint("u16"), 60000u);
  EXPECT_EQ(file_.GetUint("u32"), 4000000000u);
  EXPECT_EQ(file_.GetUint("u64"), kMax64);
  EXPECT_EQ(file_.GetUint("positive"), 7u);
  EXPECT_EQ(std::get<int64_t>(*file_.Get("i8")), -100);
  EXPECT_EQ(std::get<int64_t>(*file_.Get("i16")), -30000);
  EXPECT_EQ(std::get<int64_t>(*file_.Get("i32")), -2000000000);
  EXPECT_EQ(std::get<int64_t>(*file_.Get("i64")), kMin64);
  EXPECT_EQ(Corruption([&] { file_.GetUint("i8"); }),
            "metadata i8: found -100, expected a non-negative integer");
}

TEST_F(GgufMetadataTest, FloatsAndNumbersAsFloats) {
  EXPECT_EQ(file_.GetFloat("f32"), double{0.1f});
  EXPECT_EQ(file_.GetFloat("f64"), 0.1);
  EXPECT_EQ(file_.GetFloat("u8"), 200.0);
  EXPECT_EQ(file_.GetFloat("i16"), -30000.0);
}

TEST_F(GgufMetadataTest, Bools) {
  EXPECT_EQ(file_.GetBool("yes"), true);
  EXPECT_EQ(file_.GetBool("no"), false);
  EXPECT_EQ(std::get<bool>(*file_.Get("yes")), true);
}

TEST_F(GgufMetadataTest, StringsAreViewsIntoTheFile) {
  const std::string_view text = file_.GetString("text").value();
  EXPECT_EQ(text,
            "Gr\xC3\xBC\xC3\x9F"
            "e\n");
  EXPECT_GE(reinterpret_cast<const uint8_t*>(text.data()), bytes_.data());
  EXPECT_LT(reinterpret_cast<const uint8_t*>(text.data()),
            bytes_.data() + bytes_.size());
  EXPECT_EQ(file_.GetString("empty"), "");
  EXPECT_EQ(std::get<std::string_view>(*file_.Get("text")), text);
}

TEST_F(GgufMetadataTest, Arrays) {
  const std::vector<std::string_view> strings = {"a", "", "bc", "\xFF"};
  EXPECT_EQ(file_.GetStrings("strings"), strings);
  EXPECT_TRUE(file_.GetStrings("no strings")->empty());
  EXPECT_EQ(file_.GetFloats("floats"), (std::vector<double>{0.5, -2}));
  EXPECT_EQ(file_.GetFloats("doubles"), (std::vector<double>{1e300}));
  EXPECT_EQ(file_.GetInts("bytes"), (std::vector<int64_t>{0, 255}));
  EXPECT_EQ(file_.GetInts("i16s"), (std::vector<int64_t>{-1, 300}));
  EXPECT_EQ(file_.GetInts("u64s"), (std::vector<int64_t>{1, int64_t{1} << 62}));
  EXPECT_EQ(file_.GetInts("bools"), (std::vector<int64_t>{1, 0, 1}));
}

TEST_F(GgufMetadataTest, ArraysOfUnknownKind) {
  const auto array = [&](const char* key) {
    return std::get<GgufArray>(file_.Get(key).value()).values;
  };
  EXPECT_EQ(std::get<std::vector<std::string_view>>(array("strings"))[2], "bc");
  EXPECT_EQ(std::get<std::vector<double>>(array("floats"))[1], -2);
  EXPECT_EQ(std::get<std::vector<int64_t>>(array("i16s"))[0], -1);
}

TEST_F(GgufMetadataTest, IntegersThatDoNotFitAreRefused) {
  const std::string message =
      "metadata too big: found the element 18446744073709551615, expected "
      "integers that fit 63 bits";
  EXPECT_EQ(Corruption([&] { file_.GetInts("too big"); }), message);
  EXPECT_EQ(Corruption([&] { file_.Get("too big"); }), message);
}

TEST_F(GgufMetadataTest, OtherTypesNameTheKeyAndBothTypes) {
  EXPECT_EQ(
      Corruption([&] { file_.GetUint("text"); }),
      "metadata text: found type string, expected a non-negative integer");
  EXPECT_EQ(
      Corruption([&] { file_.GetUint("f32"); }),
      "metadata f32: found type float32, expected a non-negative integer");
  EXPECT_EQ(Corruption([&] { file_.GetUint("yes"); }),
            "metadata yes: found type bool, expected a non-negative integer");
  EXPECT_EQ(Corruption([&] { file_.GetFloat("strings"); }),
            "metadata strings: found an array of type string, expected a "
            "number");
  EXPECT_EQ(Corruption([&] { file_.GetFloat("no"); }),
            "metadata no: found type bool, expected a number");
  EXPECT_EQ(Corruption([&] { file_.GetBool("u8"); }),
            "metadata u8: found type uint8, expected a bool");
  EXPECT_EQ(Corruption([&] { file_.GetString("u64"); }),
            "metadata u64: found type uint64, expected a string");
  EXPECT_EQ(Corruption([&] { file_.GetStrings("text"); }),
            "metadata text: found type string, expected an array of strings");
  EXPECT_EQ(Corruption([&] { file_.GetStrings("floats"); }),
            "metadata floats: found an array of type float32, expected an "
            "array of strings");
  EXPECT_EQ(Corruption([&] { file_.GetFloats("bytes"); }),
            "metadata bytes: found an array of type uint8, expected an array "
            "of floats");
  EXPECT_EQ(Corruption([&] { file_.GetInts("doubles"); }),
            "metadata doubles: found an array of type float64, expected an "
            "array of integers");
}

}  // namespace
}  // namespace gkv
