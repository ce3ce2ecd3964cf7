#ifndef GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_
#define GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/drafter.h"
#include "engine/lookup_history.h"

namespace gkv {

// Finds the last occurrence of each n-gram of a growing text. Takes 5 to 16
// bytes per token.
class NgramIndex {
 public:
  explicit NgramIndex(size_t n) : n_(n) {}

  // Indexes up to `most` more n-grams of `text`, which begins with the text of
  // the call before. Starts over, with more room, if the text has outgrown the
  // table: every call takes time for `most`, apart from clearing that room.
  // Throws std::bad_alloc.
  void Update(std::span<const int32_t> text, size_t most);
  // Returns the position after the last indexed n-gram that is equal to the
  // last one of `text`; 0 if there is none.
  size_t Find(std::span<const int32_t> text) const;

 private:
  // Returns the slot of the n-gram that ends at `end`, or the empty slot for
  // it.
  size_t SlotOf(std::span<const int32_t> text, size_t end) const;

  size_t n_;
  size_t end_ = 0;               // n-grams that end before this are indexed
  std::vector<uint32_t> slots_;  // ends; 0: empty. A power of two of them
};

// Guesses that a text goes on as it did after an earlier occurrence of its last
// tokens, in its own transcript or in texts of its tenant's other requests.
//
// While it runs it learns, for each length of the match, how often that is
// right. It also checks guesses that were not computed. The next request of the
// tenant begins with what was learned.
class LookupDrafter : public Drafter {
 public:
  // How it shares with other requests of its tenant.
  struct Sharing {
    std::shared_ptr<LookupHistory> history = nullptr;  // null: nothing
    bool reads = true;
    bool writes = true;
  };

  LookupDrafter() = default;
  explicit LookupDrafter(Sharing sharing) : sharing_(std::move(sharing)) {}

  // Without memory it guesses nothing any more.
  void Read(std::span<const int32_t> added, size_t known) noexcept override;
  size_t Propose(std::span<const int32_t> added,
                 std::span<DraftGuess> guesses) noexcept override;
  void End(std::span<const int32_t> added) noexcept override;

 private:
  using Source = LookupShares::Source;
  // An earlier occurrence of the last tokens: what follows there is expected
  // now.
  struct Match {
    Source source = Source::kOwn;
    size_t length = 0;  // 0: none
    size_t end = 0;     // in text_, or `place`
    LookupHistory::Place place = {};
  };

  void Begin(size_t known);
  bool Take(std::span<const int32_t> added, size_t most) noexcept;
  void Write(size_t most);
  void Learn(std::span<const int32_t> added);
  void FindMatch();
  double Right(const Match& match, size_t after) const {
    return shares_.Right(match.source, match.length + after);
  }
  size_t MatchLength(size_t end) const;

  Sharing sharing_;
  std::vector<int32_t> text_;
  std::array<NgramIndex, 3> indexes_ = {NgramIndex(2), NgramIndex(4),
                                        NgramIndex(8)};
  uint32_t written_text_ = 0;  // its number in the history; 0: none yet
  size_t written_ = 0;         // text_ up to here is there, or is not needed
  Match match_;
  LookupShares shares_;
  bool began_ = false;
  bool gave_up_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_
