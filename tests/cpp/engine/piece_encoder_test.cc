#include "engine/piece_encoder.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/gguf_builder.h"

namespace gkv {
namespace {

// The bytes follow the four special tokens.
constexpr int32_t kByte0 = 4, kFirst = kByte0 + 256;

struct Rows {
  std::vector<std::string> pieces = {"<pad>", "<eos>", "<bos>", "<unk>"};
  std::vector<float> scores = std::vector<float>(kFirst, 0);
  std::vector<int32_t> types = {3, 3, 3, 3};

  Rows() {
    for (int value = 0; value < 256; ++value) {
      char piece[8];
      std::snprintf(piece, sizeof(piece), "<0x%02X>", value);
      pieces.emplace_back(piece);
      types.push_back(Vocabulary::kByte);
    }
  }
  Rows& Add(const std::string& piece, float score,
            int32_t type = Vocabulary::kNormal) {
    pieces.push_back(piece);
    scores.push_back(score);
    types.push_back(type);
    return *this;
  }
  PieceEncoder Encoder(bool add_space_prefix = false) const {
    GgufBuilder builder;
    builder.Set("tokenizer.ggml.model", "llama")
        .Set("tokenizer.ggml.tokens", pieces)
        .Set("tokenizer.ggml.scores", scores)
        .Set("tokenizer.ggml.token_type", types)
        .Set("tokenizer.ggml.add_space_prefix", add_space_prefix);
    const std::vector<uint8_t> bytes = builder.Build();
    return PieceEncoder(Vocabulary(GgufFile(bytes, "test")), "test");
  }
};

using Ids = std::vector<int32_t>;

TEST(PieceEncoderTest, TheHighestScoreIsJoinedFirst) {
  Rows rows;
  rows.Add("a", -9).Add("b", -9).Add("c", -9).Add("ab", -2).Add("bc", -1);
  const PieceEncoder encoder = rows.Encoder();
  EXPECT_EQ(encoder.Encode("abc"), (Ids{kFirst, kFirst + 4}));
  EXPECT_EQ(encoder.Encode("abab"), (Ids{kFirst + 3, kFirst + 3}));
  EXPECT_EQ(encoder.Encode(""), Ids{});
}

TEST(PieceEncoderTest, TheLeftmostOfEqualsIsJoinedFirst) {
  Rows rows;
  rows.Add("a", -9).Add("aa", -1);
  EXPECT_EQ(rows.Encoder().Encode("aaa"), (Ids{kFirst + 1, kFirst}));
}

TEST(PieceEncoderTest, WhatIsNoPieceBecomesBytes) {
  Rows rows;
  rows.Add("a", 0);
  EXPECT_EQ(rows.Encoder().Encode("a\xC3\xA9"),
            (Ids{kFirst, kByte0 + 0xC3, kByte0 + 0xA9}));
}

TEST(PieceEncoderTest, ControlAndByteTokensAreNoText) {
  Rows rows;
  rows.Add("a", 0).Add("b", 0, Vocabulary::kControl);
  EXPECT_EQ(rows.Encoder().Encode("ab"), (Ids{kFirst, kByte0 + 'b'}));
  EXPECT_EQ(rows.Encoder().Encode("<bos>").size(), 5u);
}

TEST(PieceEncoderTest, UserDefinedPiecesAreCutOutLongestFirst) {
  Rows rows;
  rows.Add("a", -1)
      .Add("\n", 0, Vocabulary::kUserDefined)
      .Add("\n\n\n", 0, Vocabulary::kUserDefined)
      .Add("a\n", 5);
  const PieceEncoder encoder = rows.Encoder();
  EXPECT_EQ(encoder.Encode("a\n\n\n\na"),
            (Ids{kFirst, kFirst + 2, kFirst + 1, kFirst}));
  EXPECT_EQ(encoder.Encode("\n\n"), (Ids{kFirst + 1, kFirst + 1}));
}

TEST(PieceEncoderTest, SpacesAreMarked) {
  Rows rows;
  rows.Add("\xE2\x96\x81", -1).Add("a", -1).Add("\xE2\x96\x81" "a", 0).Add(
      "  ", 0, Vocabulary::kUserDefined);
  EXPECT_EQ(rows.Encoder().Encode("a a"), (Ids{kFirst + 1, kFirst + 2}));
  EXPECT_EQ(rows.Encoder().Encode("   a"), (Ids{kFirst + 3, kFirst + 2}));
  EXPECT_EQ(rows.Encoder(true).Encode("a"), (Ids{kFirst + 2}));
  EXPECT_EQ(rows.Encoder().Piece(kFirst + 3),
            "\xE2\x96\x81\xE2\x96\x81");
}

TEST(PieceEncoderTest, UnusedPiecesAreTakenApart) {
  Rows rows;
  rows.Add("a", -9).Add("b", -9).Add("c", -9).Add("ab", -1).Add(
      "abc", 0, Vocabulary::kUnused);
  EXPECT_EQ(rows.Encoder().Encode("abc"), (Ids{kFirst + 3, kFirst + 2}));
}

TEST(PieceEncoderTest, FindsAnyPiece) {
  Rows rows;
  rows.Add("a", 0).Add("b", 0, -7);  // as a damaged file may have it
  const PieceEncoder encoder = rows.Encoder();
  ASSERT_EQ(encoder.size(), kFirst + 2u);
  for (int32_t id = 0; id < kFirst + 2; ++id) {
    EXPECT_EQ(encoder.Find(rows.pieces[static_cast<size_t>(id)]), id);
    EXPECT_EQ(encoder.Piece(id), rows.pieces[static_cast<size_t>(id)]);
  }
  EXPECT_EQ(encoder.Find("c"), -1);
  EXPECT_EQ(encoder.Find(""), -1);
  EXPECT_EQ(encoder.TypeOf(3), Vocabulary::kUnknown);
  EXPECT_EQ(encoder.TypeOf(kFirst + 1), Vocabulary::kNormal);
}

TEST(PieceEncoderTest, BadVocabulariesAreNamed) {
  const auto message = [](const Rows& rows) -> std::string {
    try {
      (void)rows.Encoder();
    } catch (const CorruptFile& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto has = [&](const Rows& rows, const char* part) {
    const std::string found = message(rows);
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  has(Rows().Add("", 0), "token 260 has no text");
  has(Rows().Add("a", 0).Add("a", 0, Vocabulary::kControl),
      "token 261 is the same text as token 260");
  has(Rows().Add("a", 0, Vocabulary::kUnknown),
      "token 260 is unknown text, expected token 3 alone");
  has(Rows().Add("<0xff>", 0, Vocabulary::kByte), "257 tokens of bytes");
  Rows none;
  none.types[kByte0 + 7] = Vocabulary::kNormal;
  has(none, "no byte <0x07>");
}

}  // namespace
}  // namespace gkv
