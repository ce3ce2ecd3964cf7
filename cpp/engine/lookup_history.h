#ifndef GEMMAKV_ENGINE_LOOKUP_HISTORY_H_
#define GEMMAKV_ENGINE_LOOKUP_HISTORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "store/address.h"

namespace gkv {

// The shares of guesses by lookup that are right, by the length of the match
// that they follow. They are learned from each guess that could be checked.
class LookupShares {
 public:
  // Matches of other texts say less than those of the same one.
  enum class Source { kOwn, kOther };

  double Right(Source source, size_t length) const {
    return right_[static_cast<size_t>(source)][ClassOf(length)];
  }
  void Learn(Source source, size_t length, bool was_right, double rate);

 private:
  static constexpr size_t kLengths = 6;  // classes of them
  static size_t ClassOf(size_t length);

  // Low for short matches: to learn that they are better costs nothing, but
  // wrong guesses cost time.
  std::array<std::array<double, kLengths>, 2> right_ = {
      {{0.06, 0.12, 0.3, 0.55, 0.8, 0.9}, {0.05, 0.1, 0.2, 0.45, 0.7, 0.85}}};
};

// The last texts of one tenant's requests, running ones included, and an index
// of their n-grams. Belongs to one thread at a time.
//
// At most kMaxTokens tokens of at most kMaxTexts texts are kept: the oldest
// texts are dropped. An n-gram is replaced by a later one in the same slot of
// the table. Every call takes constant time for each token.
class LookupHistory {
 public:
  static constexpr size_t kMaxTokens = size_t{1} << 16;
  static constexpr size_t kMaxTexts = 256;
  // Longer matches are not told apart.
  static constexpr size_t kMaxMatch = 32;
  // An n-gram is found once so many tokens follow it.
  static constexpr size_t kBehind = 16;

  // A place in a text.
  struct Place {
    uint32_t text = 0;  // 0: none
    uint32_t at = 0;
  };

  LookupHistory() = default;
  LookupHistory(const LookupHistory&) = delete;

  // Begins a text and returns its number. Throws std::bad_alloc.
  uint32_t Begin();
  // Appends tokens to a text. Returns false, doing nothing, if the text was
  // dropped meanwhile, or has become too long. Throws std::bad_alloc.
  bool Append(uint32_t text, std::span<const int32_t> tokens);
  // Ends a text: no more tokens come.
  void End(uint32_t text) noexcept;

  // Returns the place after the longest known match of the last tokens of
  // `tokens`, or of one nearly as long, and its length, which is at least 4.
  std::pair<Place, size_t> Find(std::span<const int32_t> tokens) const;
  // Returns how many of the last tokens of `tokens` stand before a place, at
  // most kMaxMatch.
  size_t MatchLength(Place place, std::span<const int32_t> tokens) const;
  // Returns the tokens from a place on; empty if they were dropped.
  std::span<const int32_t> From(Place place) const;

  LookupShares& shares() { return shares_; }
  size_t tokens() const { return tokens_; }
  // The most bytes that it takes, without the overhead of allocation.
  static constexpr size_t MaxBytes() {
    return 2 * kMaxTokens * sizeof(int32_t) + 2 * kSlots * sizeof(Place);
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 16;
  static constexpr std::array<size_t, 2> kGrams = {4, 8};

  struct Text {
    uint32_t number = 0;  // 0: none
    uint32_t indexed = 0;  // n-grams that end up to here are indexed
    std::vector<int32_t> tokens;
  };

  Text* Of(uint32_t number);
  const Text* Of(uint32_t number) const;
  void Index(Text& text, size_t end) noexcept;
  void DropOldest();

  std::vector<Text> texts_;  // text n is at n % kMaxTexts
  uint32_t oldest_ = 1, next_ = 1;
  size_t tokens_ = 0;
  std::array<std::vector<Place>, kGrams.size()> slots_;
  LookupShares shares_;
};

// The histories of tenants, at most kMaxTenants: the least recently used ones
// are dropped. Thread-safe.
class LookupHistories {
 public:
  static constexpr size_t kMaxTenants = 16;

  // Throws std::bad_alloc.
  std::shared_ptr<LookupHistory> Of(const Address& tenant);

 private:
  Mutex mutex_{AtFork::kLeaves};  // a child has histories of its own
  // The most recently used comes first.
  std::list<std::pair<Address, std::shared_ptr<LookupHistory>>> histories_
      GUARDED_BY(mutex_);
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LOOKUP_HISTORY_H_
