#ifndef GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_
#define GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/drafter.h"

namespace gkv {

// Where each n-gram of a growing text stood last. Takes 5 to 16 bytes per
// token.
class NgramIndex {
 public:
  explicit NgramIndex(size_t n) : n_(n) {}

  // Indexes up to `most` n-grams more of `text`, which begins with what it was
  // before. Starts over, with more room, where the text has outgrown it: every
  // call takes time for `most`, but for clearing that room. Throws
  // std::bad_alloc.
  void Update(std::span<const int32_t> text, size_t most);
  // The position behind the last n-gram that is indexed and equal to the last
  // one of `text`; 0 if there is none.
  size_t Find(std::span<const int32_t> text) const;

 private:
  // Of the n-gram that ends at `end`, or of the empty slot for it.
  size_t SlotOf(std::span<const int32_t> text, size_t end) const;

  size_t n_;
  size_t end_ = 0;               // n-grams that end before are indexed
  std::vector<uint32_t> slots_;  // ends; 0: empty. A power of two of them
};

// Guesses that a text goes on as it did where its last tokens stood before.
//
// How likely that is, it learns from the text itself, for each length of the
// match: also where it guesses nothing, it looks whether it would have been
// right. It guesses as many tokens as make the most of the step's time, and
// none where they cost more than they bring.
class LookupDrafter : public Drafter {
 public:
  // Where memory does not suffice it guesses nothing any more.
  size_t Propose(std::span<const int32_t> added, const DraftPrice& price,
                 std::span<int32_t> guesses) noexcept override;

 private:
  static constexpr size_t kLengths = 6;  // classes of them

  void Learn(std::span<const int32_t> added);
  void FindMatch();
  size_t MatchLength(size_t end) const;
  static size_t ClassOf(size_t length);
  size_t BestCount(const DraftPrice& price, size_t most) const;

  std::vector<int32_t> text_;
  std::array<NgramIndex, 3> indexes_ = {NgramIndex(2), NgramIndex(4),
                                        NgramIndex(8)};
  // What followed the match is expected to follow now. 0: there is none.
  size_t match_end_ = 0;
  size_t match_length_ = 0;
  // Share of right guesses behind matches of each class.
  std::array<double, kLengths> right_ = {0.15, 0.25, 0.4, 0.6, 0.8, 0.9};
  bool gave_up_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_
