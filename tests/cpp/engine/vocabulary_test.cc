#include "engine/vocabulary.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/gguf_builder.h"

namespace gkv {
namespace {

GgufBuilder SmallVocabulary() {
  GgufBuilder builder;
  builder.Set("tokenizer.ggml.model", "llama")
      .Set("tokenizer.ggml.tokens",
           std::vector<std::string>{"<pad>", "<eos>", "<bos>", "<unk>",
                                    "<0xE2>", "\xE2\x96\x81the", "  ", "a\n"})
      .Set("tokenizer.ggml.scores",
           std::vector<float>{0, 0, 0, 0, 0, -1, -2, -3})
      .Set("tokenizer.ggml.token_type",
           std::vector<int32_t>{3, 3, 3, 3, 6, 1, 4, 1})
      .Set("tokenizer.ggml.add_space_prefix", false);
  return builder;
}

TEST(VocabularyTest, TextOfTokens) {
  const std::vector<uint8_t> bytes = SmallVocabulary().Build();
  const GgufFile file(bytes, "test");
  const TokenText text = Vocabulary(file).Text();
  ASSERT_EQ(text.size(), 8u);
  EXPECT_EQ(text[0], "");  // control
  EXPECT_EQ(text[3], "");  // unknown
  EXPECT_EQ(text[4], "\xE2");
  EXPECT_EQ(text[5], " the");
  EXPECT_EQ(text[6], "  ");
  EXPECT_EQ(text[7], "a\n");
  EXPECT_EQ(text[8], "");
  EXPECT_EQ(text[-1], "");
}

TEST(VocabularyTest, ModelProtoHoldsMarkedPiecesAndTheirKinds) {
  const std::vector<uint8_t> bytes = SmallVocabulary().Build();
  const GgufFile file(bytes, "test");
  const std::string model = Vocabulary(file).SentencePieceModel();
  // Field 1 (pieces): length 11: piece (field 1) of 5 bytes, score, type 3.
  const std::string pad("\x0A\x0E\x0A\x05<pad>\x15\0\0\0\0\x18\x03", 16);
  EXPECT_EQ(model.substr(0, pad.size()), pad);
  // <unk> is the one piece of kind 2, whatever the file calls it.
  EXPECT_NE(model.find(std::string("<unk>\x15\0\0\0\0\x18\x02", 12)),
            std::string::npos);
  // Spaces of user-defined pieces are marked.
  EXPECT_NE(model.find("\x0A\x06\xE2\x96\x81\xE2\x96\x81"), std::string::npos);
}

TEST(VocabularyTest, ControlTokensAreToldByTheirNamesInEveryFamily) {
  for (const char* piece : {"<pad>",
                            "<eos>",
                            "<bos>",
                            "<unk>",
                            "<mask>",
                            "<2mass>",
                            "[@BOS@]",
                            "<unused0>",
                            "<unused6241>",
                            "<start_of_turn>",
                            "<end_of_turn>",
                            "<start_of_image>",
                            "<end_of_image>",
                            "<image_soft_token>",
                            "<start_of_audio>",
                            "<end_of_audio>",
                            "<audio_soft_token>",
                            "<start_function_declaration>",
                            "<end_function_call>",
                            "<start_function_response>",
                            "<escape>",
                            "<|fim_prefix|>",
                            "<|file_separator|>",
                            "<|turn>",
                            "<turn|>",
                            "<|image|>",
                            "<image|>",
                            "<|audio>",
                            "<|video|>",
                            "<|\"|>",
                            "<|tool_call>",
                            "<channel|>"}) {
    EXPECT_TRUE(IsControlName(piece)) << piece;
  }
  for (const char* piece : {"",           "<",           ">",
                            "<>",         "<|>",         "<||>",
                            "<b>",        "<table>",     "</table>",
                            "pad",        "<pad",        "pad>",
                            "<pad> ",     "<Pad>",       "<unused>",
                            "<unused1x>", "<start_of_>", "<start_function_>",
                            "<|a|b|>",    "<|a<b>",      "|a|",
                            "<0x41>",     "[@BOS@",      "[multimodal]",
                            "<image>"}) {
    EXPECT_FALSE(IsControlName(piece)) << piece;
  }
}

TEST(VocabularyTest, NoFileMakesTextOfAControlToken) {
  GgufBuilder builder;
  builder.Set("tokenizer.ggml.model", "llama")
      .Set("tokenizer.ggml.tokens",
           std::vector<std::string>{"<pad>", "<eos>", "<bos>", "<unk>",
                                    "<start_of_image>", "<end_of_turn>", "<b>",
                                    "<unused1>"})
      .Set("tokenizer.ggml.scores", std::vector<float>(8, 0))
      .Set("tokenizer.ggml.token_type",
           std::vector<int32_t>{3, 3, 3, 2, 4, 1, 4, 5});
  const std::vector<uint8_t> bytes = builder.Build();
  const GgufFile file(bytes, "test");
  const Vocabulary vocabulary(file);
  EXPECT_EQ(vocabulary.types, (std::vector<int64_t>{3, 3, 3, 2, 3, 3, 4, 5}));
  EXPECT_EQ(vocabulary.Text()[4], "");
  EXPECT_EQ(vocabulary.Text()[6], "<b>");
}

// Pieces whose messages have lengths of one byte are written in one go.
TEST(VocabularyTest, ModelProtoHoldsPiecesOfAnyLength) {
  std::vector<std::string> pieces = {"<pad>", "<eos>", "<bos>", "<unk>"};
  std::vector<float> scores = {0, 0, 0, 0};
  std::vector<int32_t> types = {3, 3, 3, 3};
  for (const size_t size : {0, 1, 117, 118, 119, 120, 126, 127, 128, 300}) {
    pieces.push_back(std::string(size, 'x'));
    scores.push_back(-0.5f * static_cast<float>(size));
    types.push_back(1);
  }
  types.back() = -7;  // as a damaged file may have it
  GgufBuilder builder;
  builder.Set("tokenizer.ggml.model", "llama")
      .Set("tokenizer.ggml.tokens", pieces)
      .Set("tokenizer.ggml.scores", scores)
      .Set("tokenizer.ggml.token_type", types);
  const std::vector<uint8_t> bytes = builder.Build();
  const GgufFile file(bytes, "test");
  const std::string model = Vocabulary(file).SentencePieceModel();
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(model.at(at++));
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    ASSERT_EQ(model.at(at++), 0x0A);
    const size_t size = varint();
    const size_t end = at + size;
    ASSERT_EQ(model.at(at++), 0x0A);
    ASSERT_EQ(varint(), pieces[i].size());
    EXPECT_EQ(model.substr(at, pieces[i].size()), pieces[i]);
    at += pieces[i].size();
    ASSERT_EQ(model.at(at++), 0x15);
    float score;
    std::memcpy(&score, model.data() + at, sizeof(score));
    EXPECT_EQ(score, scores[i]);
    at += sizeof(score);
    ASSERT_EQ(model.at(at++), 0x18);
    EXPECT_EQ(static_cast<int32_t>(varint()), i == 3 ? 2 : types[i]);
    EXPECT_EQ(at, end);
  }
  const TokenText text = Vocabulary(file).Text();
  ASSERT_EQ(text.size(), pieces.size());
  EXPECT_EQ(text[4], "");
  EXPECT_EQ(text[static_cast<int32_t>(pieces.size()) - 2],
            std::string(128, 'x'));
}

TEST(VocabularyTest, AllKeysTogetherSayWhetherMergesDecide) {
  const auto has_merges = [](const char* model, const char* pre, bool merges,
                             const char* architecture) -> std::string {
    GgufBuilder builder;
    if (*model != 0) builder.Set("tokenizer.ggml.model", model);
    if (*pre != 0) builder.Set("tokenizer.ggml.pre", *pre == ' ' ? "" : pre);
    if (merges) {
      builder.Set("tokenizer.ggml.merges", std::vector<std::string>{"a b"});
    }
    builder.Set("general.architecture", architecture);
    const std::vector<uint8_t> bytes = builder.Build();
    try {
      return Vocabulary::HasMerges(GgufFile(bytes, "test")) ? "yes" : "no";
    } catch (const Error& error) {
      return error.what();
    }
  };
  for (const char* family : {"gemma3", "gemma4"}) {
    // " " stands for a key that is there, and empty.
    for (const char* pre : {"", " ", "default", "gemma4"}) {
      EXPECT_EQ(has_merges("gemma4", pre, true, family), "yes");
    }
    EXPECT_EQ(has_merges("llama", "gemma4", true, family), "yes");
    for (const char* pre : {"", " ", "default"}) {
      EXPECT_EQ(has_merges("llama", pre, false, family), "no");
    }
    EXPECT_EQ(has_merges("", "", false, family), "no");
    // What contradicts itself.
    EXPECT_EQ(has_merges("llama", "gemma4", false, family),
              "test: metadata tokenizer.ggml.merges is missing, expected with "
              "tokenizer.ggml.pre 'gemma4'");
    EXPECT_EQ(has_merges("gemma4", "qwen2", true, family),
              "test: metadata tokenizer.ggml.pre is 'qwen2', expected "
              "'gemma4' with tokenizer.ggml.model 'gemma4'");
  }
  // Files of Gemma 3 may have merges beside their scores.
  EXPECT_EQ(has_merges("llama", "default", true, "gemma3"), "no");
  EXPECT_EQ(has_merges("llama", "default", true, "gemma4"), "yes");
}

TEST(VocabularyTest, TextsBeginWithoutASpaceUnlessTheFileSaysSo) {
  const auto prefix = [](GgufBuilder builder) {
    const std::vector<uint8_t> bytes = builder.Build();
    return Vocabulary(GgufFile(bytes, "test")).add_space_prefix;
  };
  GgufBuilder omits;
  omits.Set("tokenizer.ggml.model", "llama")
      .Set("tokenizer.ggml.tokens", std::vector<std::string>(4, "a"))
      .Set("tokenizer.ggml.scores", std::vector<float>(4))
      .Set("tokenizer.ggml.token_type", std::vector<int32_t>(4, 1));
  EXPECT_FALSE(prefix(omits));
  EXPECT_TRUE(prefix(omits.Set("tokenizer.ggml.add_space_prefix", true)));
}

TEST(VocabularyTest, TokensWithoutRowsAreNoText) {
  const std::vector<uint8_t> data(1 << 12);
  const auto types = [&](size_t rows, size_t tokens) {
    GgufBuilder builder;
    builder.Set("tokenizer.ggml.model", "llama")
        .Set("tokenizer.ggml.tokens", std::vector<std::string>(tokens, "a"))
        .Set("tokenizer.ggml.scores", std::vector<float>(tokens))
        .Set("tokenizer.ggml.token_type", std::vector<int32_t>(tokens, 4))
        .AddRaw("token_embd.weight", 0, {1, rows}, data);
    const std::vector<uint8_t> bytes = builder.Build();
    return Vocabulary(GgufFile(bytes, "test")).types;
  };
  EXPECT_EQ(types(8, 8).back(), Vocabulary::kUserDefined);
  EXPECT_EQ(types(9, 8).back(), Vocabulary::kUserDefined);
  EXPECT_EQ(types(7, 8)[6], Vocabulary::kUserDefined);
  EXPECT_EQ(types(7, 8)[7], Vocabulary::kControl);
  EXPECT_EQ(types(100, 356)[99], Vocabulary::kUserDefined);
  EXPECT_EQ(types(100, 356)[100], Vocabulary::kControl);
  EXPECT_THROW(types(100, 357), Mismatch) << "another model's tokenizer";
}

TEST(VocabularyTest, BadVocabulariesAreNamed) {
  const auto message = [](const GgufBuilder& builder) -> std::string {
    const std::vector<uint8_t> bytes = builder.Build();
    const GgufFile file(bytes, "test");
    try {
      const Vocabulary vocabulary(file);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  GgufBuilder other;
  other.Set("tokenizer.ggml.model", "gpt2");
  EXPECT_NE(message(other).find("'gpt2', expected 'llama'"), std::string::npos);
  EXPECT_NE(message(GgufBuilder()).find("'(none)'"), std::string::npos);
  GgufBuilder uneven;
  uneven.Set("tokenizer.ggml.model", "llama")
      .Set("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"})
      .Set("tokenizer.ggml.scores", std::vector<float>{0});
  EXPECT_NE(message(uneven).find("has 1 entries, expected 2"),
            std::string::npos);
  GgufBuilder id = SmallVocabulary();
  id.Set("tokenizer.ggml.bos_token_id", uint32_t{8});
  EXPECT_NE(message(id).find("bos_token_id is 8"), std::string::npos);
}

}  // namespace
}  // namespace gkv
