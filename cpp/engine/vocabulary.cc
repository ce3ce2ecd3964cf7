#include "engine/vocabulary.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/error.h"

namespace gkv {
namespace {

// SentencePiece writes a space inside a piece as U+2581.
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";

// Names between < and >. Names between bars are recognized by their bars.
constexpr std::string_view kControlNames[] = {
    // Gemma 1 to 3, and tokens of training texts.
    "pad",
    "eos",
    "bos",
    "unk",
    "mask",
    "2mass",
    "start_of_turn",
    "end_of_turn",
    // Images and sound of Gemma 3 and 3n.
    "start_of_image",
    "end_of_image",
    "image_soft_token",
    "start_of_audio",
    "end_of_audio",
    "audio_soft_token",
    // FunctionGemma.
    "start_function_declaration",
    "end_function_declaration",
    "start_function_call",
    "end_function_call",
    "start_function_response",
    "end_function_response",
    "escape",
};
constexpr std::string_view kUnusedName = "unused";  // and a number

// "<0xE2>" is the byte piece of 0xE2.
std::optional<char> ByteOfPiece(std::string_view piece) {
  if (piece.size() != 6 || piece.substr(0, 3) != "<0x" || piece[5] != '>') {
    return std::nullopt;
  }
  int value = 0;
  for (const char c : piece.substr(3, 2)) {
    value *= 16;
    if (c >= '0' && c <= '9') {
      value += c - '0';
    } else if (c >= 'A' && c <= 'F') {
      value += c - 'A' + 10;
    } else {
      return std::nullopt;
    }
  }
  return static_cast<char>(value);
}

// Appends `text` with each `from` replaced by `to`.
void AppendReplaced(std::string_view text, std::string_view from,
                    std::string_view to, std::string& out) {
  while (true) {
    const size_t at = text.find(from);
    out += text.substr(0, at);
    if (at == std::string_view::npos) return;
    out += to;
    text.remove_prefix(at + from.size());
  }
}

size_t BytesOf(std::span<const std::string_view> texts) {
  size_t bytes = 0;
  for (const std::string_view text : texts) bytes += text.size();
  return bytes;
}

// Writes the text of a piece, which is no longer than the piece; returns its
// end. It goes byte by byte: most pieces have fewer bytes than a call for a
// search takes.
char* WritePieceText(std::string_view piece, int64_t type, char* out) {
  if (type == Vocabulary::kControl || type == Vocabulary::kUnknown ||
      type == Vocabulary::kUnused) {
    return out;
  }
  if (type == Vocabulary::kByte) {
    if (const std::optional<char> byte = ByteOfPiece(piece)) {
      *out = *byte;
      return out + 1;
    }
  }
  for (size_t i = 0; i < piece.size(); ++i) {
    if (piece[i] == kSpaceMark[0] &&
        piece.substr(i, kSpaceMark.size()) == kSpaceMark) {
      *out++ = ' ';
      i += kSpaceMark.size() - 1;
    } else {
      *out++ = piece[i];
    }
  }
  return out;
}

// The most added tokens without rows in models without images or sounds: Gemma
// 3 has one, Gemma 3n 256. With more, the tokenizer is another model's.
constexpr size_t kMostTextsWithoutRows = 256;

// Lengths below this need one byte, even that of the message around a piece.
constexpr size_t kShortPiece = 0x80 - 9;

// Protocol buffer wire format: varint, fixed32 and length-delimited fields.
class ProtoWriter {
 public:
  void Varint(uint32_t field, uint64_t value) {
    Raw(field << 3 | 0);
    Raw(value);
  }
  void Float(uint32_t field, float value) {
    Raw(field << 3 | 5);
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    for (int i = 0; i < 4; ++i) {
      bytes_ += static_cast<char>(bits >> (8 * i) & 0xFF);
    }
  }
  void Bytes(uint32_t field, std::string_view value) {
    Raw(field << 3 | 2);
    Raw(value.size());
    bytes_ += value;
  }
  // Writes field 1: a message of `piece` in field 1, `score` in 2, `type` in 3.
  // Nearly all of a vocabulary are such messages. The bytes are the same as by
  // the functions above, in a third of the time.
  void ShortPiece(std::string_view piece, float score, uint64_t type) {
    char head[4] = {1 << 3 | 2, 0, 1 << 3 | 2, 0};
    char tail[7] = {2 << 3 | 5, 0, 0, 0, 0, 3 << 3 | 0, 0};
    head[3] = static_cast<char>(piece.size());
    head[1] = static_cast<char>(2 + piece.size() + sizeof(tail));
    std::memcpy(tail + 1, &score, sizeof(score));
    tail[6] = static_cast<char>(type);
    bytes_.append(head, sizeof(head));
    bytes_ += piece;
    bytes_.append(tail, sizeof(tail));
  }
  void Clear() { bytes_.clear(); }
  std::string& bytes() { return bytes_; }

 private:
  void Raw(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_ += static_cast<char>((value & 0x7F) | 0x80);
    }
    bytes_ += static_cast<char>(value);
  }
  std::string bytes_;
};

template <typename T>
std::vector<T> RequireArray(const GgufFile& file, const char* key,
                            std::optional<std::vector<T>> values,
                            size_t expected) {
  if (!values) {
    throw CorruptFile(StrCat(file.path(), ": metadata ", key, " is missing"));
  }
  if (expected != 0 && values->size() != expected) {
    throw CorruptFile(StrCat(file.path(), ": metadata ", key, " has ",
                             values->size(), " entries, expected ", expected));
  }
  return *std::move(values);
}

}  // namespace

bool IsControlName(std::string_view piece) {
  if (piece == "[@BOS@]") return true;
  if (piece.size() < 3 || piece.front() != '<' || piece.back() != '>') {
    return false;
  }
  std::string_view name = piece.substr(1, piece.size() - 2);
  if (name.starts_with(kUnusedName) && name.size() > kUnusedName.size() &&
      name.find_first_not_of("0123456789", kUnusedName.size()) ==
          std::string_view::npos) {
    return true;
  }
  // <|turn>, <turn|>, <|image|>
  const bool barred = name.front() == '|' || name.back() == '|';
  if (!barred) {
    return std::find(std::begin(kControlNames), std::end(kControlNames),
                     name) != std::end(kControlNames);
  }
  if (name.front() == '|') name.remove_prefix(1);
  if (!name.empty() && name.back() == '|') name.remove_suffix(1);
  return !name.empty() && name.find_first_of("|<>") == std::string_view::npos;
}

TokenText::TokenText(std::span<const std::string_view> texts) {
  Reserve(BytesOf(texts), texts.size());
  bytes_.clear();
  for (const std::string_view text : texts) {
    bytes_ += text;
    ends_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
}

void TokenText::Reserve(size_t bytes, size_t tokens) {
  if (bytes > UINT32_MAX) {
    throw InvalidArgument(StrCat("token texts have ", bytes,
                                 " bytes in total, expected at most ",
                                 UINT32_MAX));
  }
  bytes_.resize(bytes);
  ends_.reserve(tokens);
}

std::string_view TokenText::operator[](int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= ends_.size()) return {};
  const size_t i = static_cast<size_t>(id);
  const size_t begin = i == 0 ? 0 : ends_[i - 1];
  return std::string_view(bytes_).substr(begin, ends_[i] - begin);
}

Vocabulary::Vocabulary(const GgufFile& file) {
  const std::optional<std::string_view> model =
      file.GetString("tokenizer.ggml.model");
  if (!model || *model != "llama" || HasMerges(file)) {
    throw Mismatch(StrCat(file.path(), ": the tokenizer is '",
                          model.value_or("(none)"),
                          "', expected 'llama' (SentencePiece) or 'gemma4'"));
  }
  pieces = RequireArray(file, "tokenizer.ggml.tokens",
                        file.GetStrings("tokenizer.ggml.tokens"), 0);
  scores = RequireArray(file, "tokenizer.ggml.scores",
                        file.GetFloats("tokenizer.ggml.scores"), pieces.size());
  types =
      RequireArray(file, "tokenizer.ggml.token_type",
                   file.GetInts("tokenizer.ggml.token_type"), pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    if ((types[i] == kNormal || types[i] == kUserDefined) &&
        IsControlName(pieces[i])) {
      types[i] = kControl;
    }
  }
  const auto id = [&](const char* key, uint64_t fallback) {
    const uint64_t value = file.GetUint(key).value_or(fallback);
    if (value >= pieces.size()) {
      throw CorruptFile(StrCat(file.path(), ": metadata ", key, " is ", value,
                               ", expected an id below ", pieces.size()));
    }
    return static_cast<int32_t>(value);
  };
  bos_id = id("tokenizer.ggml.bos_token_id", 2);
  eos_id = id("tokenizer.ggml.eos_token_id", 1);
  unk_id = id("tokenizer.ggml.unknown_token_id", 3);
  pad_id = id("tokenizer.ggml.padding_token_id", 0);
  // Texts of all families begin without a space; Ollama's files, and those of
  // early converters, take that for granted.
  add_space_prefix =
      file.GetBool("tokenizer.ggml.add_space_prefix").value_or(false);
  LeaveOutTokensWithoutRows(file);
}

bool Vocabulary::HasMerges(const GgufFile& file) {
  constexpr const char *kModel = "tokenizer.ggml.model",
                       *kPre = "tokenizer.ggml.pre",
                       *kMerges = "tokenizer.ggml.merges";
  const std::string_view model = file.GetString(kModel).value_or("");
  if (model != "llama" && model != "gemma4") return false;
  // llama.cpp writes an empty string for a key that it has not read.
  const std::string_view pre = file.GetString(kPre).value_or("");
  const bool of_gemma4 = pre == "gemma4";
  if (model == "gemma4") {
    if (of_gemma4 || pre.empty() || pre == "default") return true;
    throw Mismatch(StrCat(file.path(), ": metadata ", kPre, " is '", pre,
                          "', expected 'gemma4' with ", kModel, " 'gemma4'"));
  }
  if (file.Has(kMerges)) {
    return of_gemma4 || file.GetString("general.architecture")
                            .value_or("")
                            .starts_with("gemma4");
  }
  if (!of_gemma4) return false;
  throw CorruptFile(StrCat(file.path(), ": metadata ", kMerges,
                           " is missing, expected with ", kPre, " 'gemma4'"));
}

void Vocabulary::LeaveOutTokensWithoutRows(const GgufFile& file) {
  for (const GgufFile::TensorInfo& tensor : file.tensors()) {
    if (tensor.name != "token_embd.weight" || tensor.shape.size() != 2) {
      continue;
    }
    const uint64_t rows = tensor.shape[1];
    size_t texts = 0;
    for (uint64_t i = rows; i < types.size(); ++i) {
      texts +=
          types[i] != kControl && types[i] != kUnknown && types[i] != kUnused;
      types[i] = kControl;
    }
    if (texts > kMostTextsWithoutRows) {
      throw Mismatch(StrCat(file.path(), ": tokenizer: found ", types.size(),
                            " tokens, expected about as many as the model's ",
                            rows, " rows"));
    }
  }
}

TokenText Vocabulary::Text() const {
  TokenText text;
  text.Reserve(BytesOf(pieces), pieces.size());
  char* const begin = text.bytes_.data();
  char* end = begin;
  for (size_t i = 0; i < pieces.size(); ++i) {
    end = WritePieceText(pieces[i], types[i], end);
    text.ends_.push_back(static_cast<uint32_t>(end - begin));
  }
  text.bytes_.resize(static_cast<size_t>(end - begin));
  return text;
}

std::string Vocabulary::SentencePieceModel() const {
  ProtoWriter model;
  ProtoWriter message;
  model.bytes().reserve(BytesOf(pieces) + 16 * pieces.size());
  std::string marked;
  for (size_t i = 0; i < pieces.size(); ++i) {
    // User-defined pieces are stored with plain spaces, but SentencePiece
    // matches them in text whose spaces it has marked already.
    std::string_view piece = pieces[i];
    if (piece.find(' ') != std::string_view::npos) {
      marked.clear();
      AppendReplaced(piece, " ", kSpaceMark, marked);
      piece = marked;
    }
    const bool is_unknown = static_cast<int64_t>(i) == unk_id;
    const auto type = static_cast<uint64_t>(is_unknown ? kUnknown : types[i]);
    const auto score = static_cast<float>(scores[i]);
    if (piece.size() < kShortPiece && type < 0x80) {
      model.ShortPiece(piece, score, type);
      continue;
    }
    message.Clear();
    message.Bytes(1, piece);
    message.Float(2, score);
    message.Varint(3, type);
    model.Bytes(1, message.bytes());
  }
  message.Clear();       // trainer_spec
  message.Varint(3, 2);  // model_type = BPE
  message.Varint(4, pieces.size());
  message.Varint(35, 1);  // byte_fallback
  message.Varint(40, static_cast<uint64_t>(unk_id));
  message.Varint(41, static_cast<uint64_t>(bos_id));
  message.Varint(42, static_cast<uint64_t>(eos_id));
  message.Varint(43, static_cast<uint64_t>(pad_id));
  model.Bytes(2, message.bytes());
  message.Clear();  // normalizer_spec
  message.Bytes(1, "identity");
  message.Varint(3, add_space_prefix ? 1 : 0);  // add_dummy_prefix
  message.Varint(4, 0);                         // remove_extra_whitespaces
  message.Varint(5, 1);                         // escape_whitespaces
  model.Bytes(3, message.bytes());
  return std::move(model.bytes());
}

}  // namespace gkv
