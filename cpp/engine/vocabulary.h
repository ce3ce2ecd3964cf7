#ifndef GEMMAKV_ENGINE_VOCABULARY_H_
#define GEMMAKV_ENGINE_VOCABULARY_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"

namespace gkv {

struct Vocabulary;

// Whether a piece is a control token by its name: a mark of turns, images,
// sound, tools or thoughts of any Gemma, or a reserved token. Files call some
// of them text, to have them shown, or by mistake; no text may become one.
bool IsControlName(std::string_view piece);

// The text of every token, so that generation can find stop strings and stream
// text without a tokenizer. Immutable.
class TokenText {
 public:
  TokenText() = default;
  explicit TokenText(std::span<const std::string_view> texts);

  // Returns the UTF-8 bytes of a token: possibly part of a character (byte
  // tokens), empty for control tokens and ids outside the vocabulary.
  std::string_view operator[](int32_t id) const;
  size_t size() const { return ends_.size(); }
  bool operator==(const TokenText&) const = default;

 private:
  friend struct Vocabulary;

  // Makes room for so many bytes, which are zeros until they are written.
  void Reserve(size_t bytes, size_t tokens);

  std::string bytes_;           // all texts back to back
  std::vector<uint32_t> ends_;  // [size()]
};

// The SentencePiece vocabulary of a GGUF file. Views into the file.
struct Vocabulary {
  // Kinds of tokens as tokenizer.ggml.token_type has them.
  enum Type : int64_t {
    kNormal = 1,
    kUnknown = 2,
    kControl = 3,
    kUserDefined = 4,
    kUnused = 5,
    kByte = 6,
  };
  std::vector<std::string_view> pieces;
  std::vector<double> scores;
  std::vector<int64_t> types;  // kControl where the name says so
  int32_t bos_id, eos_id, unk_id, pad_id;
  bool add_space_prefix;

  // Tokens without a row in the file's embedding, if it has one, become control
  // tokens, whatever the file calls them: no text becomes one. Throws Mismatch
  // if the file's tokenizer is not SentencePiece, or another model's by the
  // number of its tokens, CorruptFile if its arrays are missing or of different
  // lengths.
  explicit Vocabulary(const GgufFile& file);

  // Whether merges decide, not scores, as in Gemma 4's vocabulary, which is not
  // read here: its reader sets the text of the tokens. All keys together say
  // so, since some converters call Gemma 4's vocabulary 'llama'. Throws
  // Mismatch or CorruptFile if the keys contradict each other.
  static bool HasMerges(const GgufFile& file);

  TokenText Text() const;

  // Returns the serialized ModelProto that the SentencePiece library loads
  // (sentencepiece_model.proto: pieces = 1, trainer_spec = 2, normalizer_spec =
  // 3). Scores decide merges, as in the BPE models that Gemma's vocabulary was
  // trained as.
  std::string SentencePieceModel() const;

 private:
  void LeaveOutTokensWithoutRows(const GgufFile& file);
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_VOCABULARY_H_
