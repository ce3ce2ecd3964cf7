#ifndef GEMMAKV_ENGINE_PIECE_ENCODER_H_
#define GEMMAKV_ENGINE_PIECE_ENCODER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/vocabulary.h"

namespace gkv {

// Encodes text to token ids: the same ids as the SentencePiece library gives
// for `Vocabulary::SentencePieceModel`, from tables that take a tenth of the
// time and of the memory. Immutable, safe from several threads.
class PieceEncoder {
 public:
  // Throws CorruptFile for a vocabulary that the library refuses: one with an
  // empty piece, with a piece twice, or without a token for each byte. `name`
  // is for errors. Keeps nothing of `vocabulary`.
  PieceEncoder(const Vocabulary& vocabulary, const std::string& name);

  // Requires: `text` is UTF-8.
  std::vector<int32_t> Encode(std::string_view text) const;

  size_t size() const { return types_.size(); }
  // Requires: 0 <= id < size(). Spaces of a piece are marked, as in the model.
  std::string_view Piece(int32_t id) const;
  Vocabulary::Type TypeOf(int32_t id) const {
    return static_cast<Vocabulary::Type>(types_[static_cast<size_t>(id)]);
  }
  // Returns the token of exactly this piece, of any type; -1 if there is none.
  int32_t Find(std::string_view piece) const;

 private:
  class Joiner;
  // A slot of the hash table. `id` is -1 if it is empty.
  struct Slot {
    uint32_t hash;
    int32_t id;
  };
  void AddPieces(const Vocabulary& vocabulary, const std::string& name);
  void FindBytes(const std::string& name);
  void SortUserDefined();
  int32_t FindText(std::string_view piece) const;
  size_t SymbolAt(std::string_view text, bool* whole) const;

  std::string bytes_;           // all pieces back to back
  std::vector<uint32_t> ends_;  // [size()]
  std::vector<float> scores_;   // [size()]
  std::vector<uint8_t> types_;  // [size()]
  std::vector<Slot> slots_;     // a power of two, at most two thirds full
  std::array<int32_t, 256> byte_ids_;
  std::vector<int32_t> user_defined_;        // by their bytes
  std::array<uint32_t, 257> first_by_byte_;  // in user_defined_
  bool add_space_prefix_;
  bool has_unused_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_PIECE_ENCODER_H_
