// The algorithm of the library, as far as models of Gemma's kind use it:
//   1. Spaces are marked.
//   2. User-defined pieces are cut out, the longest first.
//   3. Of the pairs of neighbours that are a piece together, the one with the
//      highest score is joined, the leftmost of equals, until none is left.
//   4. Unused pieces are taken apart again.
//   5. Text that is no piece becomes bytes.

#include "engine/piece_encoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <queue>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace gkv {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";

// Returns the length of the character that begins with this byte.
size_t CharacterBytes(char first) {
  constexpr char kBytes[] = "\1\1\1\1\1\1\1\1\1\1\1\1\2\2\3\4";
  return static_cast<size_t>(kBytes[static_cast<uint8_t>(first) >> 4]);
}

template <typename T>
uint64_t Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint32_t HashOf(std::string_view piece) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
  const char* at = piece.data();
  size_t left = piece.size();
  uint64_t hash = left * kFactor;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * kFactor;
    hash ^= hash >> 32;
  };
  for (; left > 8; at += 8, left -= 8) mix(Load<uint64_t>(at));
  if (left >= 4) {  // overlapping
    mix(Load<uint32_t>(at) | Load<uint32_t>(at + left - 4) << 32);
  } else if (left > 0) {
    mix(Load<uint8_t>(at) | Load<uint8_t>(at + left / 2) << 8 |
        Load<uint8_t>(at + left - 1) << 16);
  }
  return static_cast<uint32_t>(hash ^ hash >> 29);
}

std::string Marked(std::string_view text, bool prefix) {
  std::string marked;
  const auto spaces =
      static_cast<size_t>(std::count(text.begin(), text.end(), ' '));
  marked.reserve(text.size() + 2 * spaces + kSpaceMark.size());
  if (prefix) marked += kSpaceMark;
  for (const char c : text) {
    if (c == ' ') {
      marked += kSpaceMark;
    } else {
      marked += c;
    }
  }
  return marked;
}

}  // namespace

// Joins neighbours of a run of characters, one run after the other.
class PieceEncoder::Joiner {
 public:
  explicit Joiner(const PieceEncoder& encoder) : encoder_(encoder) {}

  // Adds a character, or a `whole` piece, which nothing is joined to.
  void Add(std::string_view piece, bool whole) {
    const auto i = static_cast<int32_t>(symbols_.size());
    symbols_.push_back({piece, i - 1, i + 1, whole});
  }
  // Ends a run: nothing after it is joined to it.
  void Close(std::vector<int32_t>& ids);

 private:
  // A piece of text that is a token, or becomes a part of one.
  struct Symbol {
    std::string_view piece;  // empty: it was joined to the one before
    int32_t previous, next;  // -1 at the ends
    bool whole;
  };
  // Two neighbours that are a piece together.
  struct Pair {
    float score;
    int32_t left, right;
    uint32_t size;  // of both, when the pair was found

    bool operator<(const Pair& other) const {
      return score < other.score ||
             (score == other.score && left > other.left);
    }
  };

  Symbol& At(int32_t i) { return symbols_[static_cast<size_t>(i)]; }
  void Consider(int32_t left, int32_t right);
  void Join(const Pair& pair);
  void Append(std::string_view piece, std::vector<int32_t>& ids);

  const PieceEncoder& encoder_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Pair> pairs_;
  // Unused pieces, and the two parts that each was joined from last.
  std::unordered_map<std::string_view,
                     std::pair<std::string_view, std::string_view>>
      parts_;
  std::vector<std::string_view> pending_;
};

void PieceEncoder::Joiner::Consider(int32_t left, int32_t right) {
  if (left < 0 || right < 0 || At(left).whole || At(right).whole) return;
  const std::string_view a = At(left).piece, b = At(right).piece;
  const std::string_view both(a.data(), a.size() + b.size());
  const int32_t id = encoder_.FindText(both);
  if (id < 0) return;
  pairs_.push({encoder_.scores_[static_cast<size_t>(id)], left, right,
               static_cast<uint32_t>(both.size())});
  if (encoder_.TypeOf(id) == Vocabulary::kUnused) parts_[both] = {a, b};
}

void PieceEncoder::Joiner::Join(const Pair& pair) {
  Symbol& left = At(pair.left);
  Symbol& right = At(pair.right);
  // One of the two may have been joined to another meanwhile.
  if (left.piece.empty() || right.piece.empty() ||
      left.piece.size() + right.piece.size() != pair.size) {
    return;
  }
  left.piece = {left.piece.data(), pair.size};
  left.next = right.next;
  if (right.next >= 0) At(right.next).previous = pair.left;
  right.piece = {};
  Consider(left.previous, pair.left);
  Consider(pair.left, left.next);
}

void PieceEncoder::Joiner::Append(std::string_view piece,
                                  std::vector<int32_t>& ids) {
  pending_.push_back(piece);  // a stack
  while (!pending_.empty()) {
    const std::string_view next = pending_.back();
    pending_.pop_back();
    const int32_t id = encoder_.FindText(next);
    if (id >= 0 && encoder_.TypeOf(id) != Vocabulary::kUnused) {
      ids.push_back(id);
      continue;
    }
    const auto found = id < 0 ? parts_.end() : parts_.find(next);
    if (found != parts_.end()) {
      pending_.push_back(found->second.second);
      pending_.push_back(found->second.first);
      continue;
    }
    for (const char c : next) {
      ids.push_back(encoder_.byte_ids_[static_cast<uint8_t>(c)]);
    }
  }
}

void PieceEncoder::Joiner::Close(std::vector<int32_t>& ids) {
  if (symbols_.empty()) return;
  symbols_.back().next = -1;
  for (size_t i = 1; i < symbols_.size(); ++i) {
    Consider(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  }
  while (!pairs_.empty()) {
    const Pair best = pairs_.top();
    pairs_.pop();
    Join(best);
  }
  for (int32_t i = 0; i >= 0; i = At(i).next) Append(At(i).piece, ids);
  symbols_.clear();
}

PieceEncoder::PieceEncoder(const Vocabulary& vocabulary,
                           const std::string& name)
    : add_space_prefix_(vocabulary.add_space_prefix) {
  AddPieces(vocabulary, name);
  FindBytes(name);
  SortUserDefined();
}

void PieceEncoder::AddPieces(const Vocabulary& vocabulary,
                             const std::string& name) {
  const size_t count = vocabulary.pieces.size();
  const auto fail = [&](size_t id, const std::string& what) {
    throw CorruptFile(
        StrCat(name, ": metadata tokenizer.ggml.tokens: token ", id, what));
  };
  size_t bytes = 0;
  for (const std::string_view piece : vocabulary.pieces) bytes += piece.size();
  bytes_.reserve(bytes + bytes / 8);
  ends_.reserve(count);
  scores_.reserve(count);
  types_.reserve(count);
  slots_.assign(std::bit_ceil(count + count / 2 + 1), Slot{0, -1});
  // Several at a time, so that their slots of the table are prefetched.
  constexpr size_t kAtATime = 32;
  uint32_t hashes[kAtATime];
  for (size_t begin = 0; begin < count; begin += kAtATime) {
    const size_t end = std::min(count, begin + kAtATime);
    for (size_t i = begin; i < end; ++i) {
      std::string_view piece = vocabulary.pieces[i];
      if (piece.empty()) fail(i, " has no text");
      if (std::memchr(piece.data(), ' ', piece.size()) == nullptr) {
        bytes_ += piece;
      } else {
        bytes_ += Marked(piece, false);
      }
      if (bytes_.size() > std::numeric_limits<uint32_t>::max()) {
        fail(i, " ends beyond 4 GB");
      }
      ends_.push_back(static_cast<uint32_t>(bytes_.size()));
      scores_.push_back(static_cast<float>(vocabulary.scores[i]));
      int64_t type = vocabulary.types[i];
      if (type < Vocabulary::kNormal || type > Vocabulary::kByte) {
        type = Vocabulary::kNormal;
      }
      if (static_cast<int64_t>(i) == vocabulary.unk_id) {
        type = Vocabulary::kUnknown;
      } else if (type == Vocabulary::kUnknown) {
        fail(i, StrCat(" is unknown text, expected token ", vocabulary.unk_id,
                       " alone to be"));
      }
      types_.push_back(static_cast<uint8_t>(type));
      has_unused_ = has_unused_ || type == Vocabulary::kUnused;
      hashes[i - begin] = HashOf(Piece(static_cast<int32_t>(i)));
      __builtin_prefetch(&slots_[hashes[i - begin] & (slots_.size() - 1)], 1);
    }
    for (size_t i = begin; i < end; ++i) {
      const auto id = static_cast<int32_t>(i);
      const uint32_t hash = hashes[i - begin];
      size_t at = hash & (slots_.size() - 1);
      for (; slots_[at].id >= 0; at = (at + 1) & (slots_.size() - 1)) {
        if (slots_[at].hash == hash && Piece(slots_[at].id) == Piece(id)) {
          fail(i, StrCat(" is the same text as token ", slots_[at].id));
        }
      }
      slots_[at] = {hash, id};
    }
  }
}

void PieceEncoder::FindBytes(const std::string& name) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  for (size_t value = 0; value < byte_ids_.size(); ++value) {
    const char piece[] = {'<', '0', 'x', kDigits[value >> 4],
                          kDigits[value & 15], '>'};
    const std::string_view text(piece, sizeof(piece));
    byte_ids_[value] = Find(text);
    if (byte_ids_[value] < 0 ||
        TypeOf(byte_ids_[value]) != Vocabulary::kByte) {
      throw CorruptFile(StrCat(name, ": the vocabulary has no byte ", text,
                               ", expected all 256"));
    }
  }
  const auto bytes = std::count(types_.begin(), types_.end(),
                                static_cast<uint8_t>(Vocabulary::kByte));
  if (bytes != static_cast<std::ptrdiff_t>(byte_ids_.size())) {
    throw CorruptFile(StrCat(name, ": the vocabulary has ", bytes,
                             " tokens of bytes, expected 256"));
  }
}

void PieceEncoder::SortUserDefined() {
  for (size_t i = 0; i < types_.size(); ++i) {
    if (types_[i] == Vocabulary::kUserDefined) {
      user_defined_.push_back(static_cast<int32_t>(i));
    }
  }
  std::sort(user_defined_.begin(), user_defined_.end(),
            [this](int32_t a, int32_t b) { return Piece(a) < Piece(b); });
  first_by_byte_.fill(0);
  for (const int32_t id : user_defined_) {
    ++first_by_byte_[static_cast<uint8_t>(Piece(id)[0]) + size_t{1}];
  }
  for (size_t i = 1; i < first_by_byte_.size(); ++i) {
    first_by_byte_[i] += first_by_byte_[i - 1];
  }
}

std::string_view PieceEncoder::Piece(int32_t id) const {
  const auto i = static_cast<size_t>(id);
  const size_t begin = i == 0 ? 0 : ends_[i - 1];
  return std::string_view(bytes_).substr(begin, ends_[i] - begin);
}

int32_t PieceEncoder::Find(std::string_view piece) const {
  const uint32_t hash = HashOf(piece);
  const size_t mask = slots_.size() - 1;
  for (size_t at = hash & mask; slots_[at].id >= 0; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.hash == hash && Piece(slot.id) == piece) return slot.id;
  }
  return -1;
}

// As Find, but -1 for control, unknown and byte tokens, which no text becomes.
int32_t PieceEncoder::FindText(std::string_view piece) const {
  const int32_t id = Find(piece);
  if (id < 0) return id;
  const Vocabulary::Type type = TypeOf(id);
  return type == Vocabulary::kNormal || type == Vocabulary::kUserDefined ||
                 type == Vocabulary::kUnused
             ? id
             : -1;
}

// Returns the length of the longest user-defined piece that `text` begins with,
// which is `whole`, or else of its first character. Requires: not empty.
size_t PieceEncoder::SymbolAt(std::string_view text, bool* whole) const {
  const auto first = static_cast<uint8_t>(text[0]);
  // The pieces that share the text's bytes up to here.
  auto begin = user_defined_.begin() + first_by_byte_[first];
  auto end = user_defined_.begin() + first_by_byte_[first + size_t{1}];
  size_t longest = 0;
  for (size_t depth = 1; begin != end; ++depth) {
    if (Piece(*begin).size() == depth) {
      longest = depth;
      ++begin;
    }
    if (depth == text.size()) break;
    const auto next = static_cast<uint8_t>(text[depth]);
    const auto at = [&](int32_t id) {
      return static_cast<uint8_t>(Piece(id)[depth]);
    };
    begin = std::partition_point(begin, end,
                                 [&](int32_t id) { return at(id) < next; });
    end = std::partition_point(begin, end,
                               [&](int32_t id) { return at(id) == next; });
  }
  *whole = longest > 0;
  return *whole ? longest : std::min(text.size(), CharacterBytes(text[0]));
}

std::vector<int32_t> PieceEncoder::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  if (text.empty()) return ids;
  const std::string marked = Marked(text, add_space_prefix_);
  if (marked.size() > std::numeric_limits<int32_t>::max()) {
    throw InvalidArgument(StrCat("text has ", text.size(),
                                 " bytes, expected less than 2 GB with each "
                                 "space as 3 bytes"));
  }
  Joiner joiner(*this);
  for (std::string_view rest = marked; !rest.empty();) {
    bool whole;
    const std::string_view symbol = rest.substr(0, SymbolAt(rest, &whole));
    rest.remove_prefix(symbol.size());
    joiner.Add(symbol, whole);
    // Short runs stay in the processor's cache. How an unused piece is taken
    // apart depends on the whole text.
    if (whole && !has_unused_) joiner.Close(ids);
  }
  joiner.Close(ids);
  return ids;
}

}  // namespace gkv
