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

// Finds where each n-gram of a growing text stood last. Takes 5 to 16 bytes per
// token.
class NgramIndex {
 public:
  explicit NgramIndex(size_t n) : n_(n) {}

  // Indexes up to `most` n-grams more of `text`, which begins with what it was
  // before. Starts over, with more room, where the text has outgrown it: every
  // call takes time for `most`, but for clearing that room. Throws
  // std::bad_alloc.
  void Update(std::span<const int32_t> text, size_t most);
  // The position after the last n-gram that is indexed and equal to the last
  // one of `text`; 0 if there is none.
  size_t Find(std::span<const int32_t> text) const;

 private:
  // The slot of the n-gram that ends at `end`, or the empty one for it.
  size_t SlotOf(std::span<const int32_t> text, size_t end) const;

  size_t n_;
  size_t end_ = 0;               // n-grams that end before are indexed
  std::vector<uint32_t> slots_;  // ends; 0: empty. A power of two of them
};

// Guesses that a text goes on as it did where its last tokens stood before: in
// its own transcript, or in what its tenant's other requests said.
//
// How likely that is, it learns while it runs, for each length of the match:
// also where none of its guesses is computed, it looks whether they would have
// been right. What one request learned of that, the next one of its tenant
// begins with.
class LookupDrafter : public Drafter {
 public:
  // What it has to do with other requests of its tenant.
  struct Sharing {
    std::shared_ptr<LookupHistory> history = nullptr;  // null: nothing
    bool reads = true;
    bool writes = true;
  };

  LookupDrafter() = default;
  explicit LookupDrafter(Sharing sharing) : sharing_(std::move(sharing)) {}

  // Where memory does not suffice it guesses nothing any more.
  void Read(std::span<const int32_t> added, size_t known) noexcept override;
  size_t Propose(std::span<const int32_t> added,
                 std::span<DraftGuess> guesses) noexcept override;
  void End(std::span<const int32_t> added) noexcept override;

 private:
  using Source = LookupShares::Source;
  // Where the last tokens stood before: what follows there is expected now.
  struct Match {
    Source source = Source::kOwn;
    size_t length = 0;  // 0: none
    size_t end = 0;     // in text_, or
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
  uint32_t written_text_ = 0;  // of the history; 0: none yet
  size_t written_ = 0;         // text_ up to here is there, or need not be
  Match match_;
  LookupShares shares_;
  bool began_ = false;
  bool gave_up_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LOOKUP_DRAFTER_H_
