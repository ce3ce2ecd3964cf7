#include "engine/lookup_drafter.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <new>

namespace gkv {
namespace {

// Tokens of a long prompt that one call indexes: about a millisecond's worth.
constexpr size_t kIndexedPerCall = 4096;
// Longer matches are not told apart.
constexpr size_t kMaxMatch = 32;
// Weight of the last guess among those that a share is learned from.
constexpr double kLearningRate = 0.08;
// What guesses have to bring at least, as a share of what there is without:
// prices are measured, and vary.
constexpr double kLeastGain = 0.03;

uint64_t HashOf(std::span<const int32_t> tokens) {
  uint64_t hash = 0;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

size_t NgramIndex::SlotOf(std::span<const int32_t> text, size_t end) const {
  const std::span<const int32_t> gram = text.subspan(end - n_, n_);
  size_t slot = HashOf(gram) & (slots_.size() - 1);
  while (
      slots_[slot] != 0 &&
      !std::equal(gram.begin(), gram.end(),
                  text.begin() + static_cast<ptrdiff_t>(slots_[slot] - n_))) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

void NgramIndex::Update(std::span<const int32_t> text, size_t most) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) return;
  if (slots_.size() / 4 * 3 < text.size()) {
    slots_.assign(std::bit_ceil(2 * text.size()), 0);
    end_ = 0;
  }
  end_ = std::max(end_, n_);
  // The last n-gram would hide where it stood before.
  for (; end_ < text.size() && most > 0; ++end_, --most) {
    slots_[SlotOf(text, end_)] = static_cast<uint32_t>(end_);
  }
}

size_t NgramIndex::Find(std::span<const int32_t> text) const {
  if (text.size() < n_ || slots_.empty()) return 0;
  return slots_[SlotOf(text, text.size())];
}

size_t LookupDrafter::ClassOf(size_t length) {
  constexpr size_t kFrom[kLengths] = {0, 3, 5, 8, 14, 24};
  return static_cast<size_t>(
      std::upper_bound(std::begin(kFrom), std::end(kFrom), length) -
      std::begin(kFrom) - 1);
}

// Compares what came with what would have been guessed.
void LookupDrafter::Learn(std::span<const int32_t> added) {
  if (match_end_ == 0) return;
  for (size_t i = 0; i < added.size(); ++i) {
    const bool was_right = text_[match_end_ + i] == added[i];
    double& share = right_[ClassOf(match_length_ + i)];
    share += kLearningRate * ((was_right ? 1 : 0) - share);
    if (!was_right) {
      match_end_ = 0;
      return;
    }
  }
  match_end_ += added.size();
}

// Tokens before `end` that are the last ones of the text.
size_t LookupDrafter::MatchLength(size_t end) const {
  const size_t most = std::min(end, kMaxMatch);
  size_t length = 0;
  while (length < most &&
         text_[end - 1 - length] == text_[text_.size() - 1 - length]) {
    ++length;
  }
  return length;
}

void LookupDrafter::FindMatch() {
  // Where the last one goes on, it stays unless a longer one is known.
  match_length_ = match_end_ == 0 ? 0 : MatchLength(match_end_);
  for (auto index = indexes_.rbegin(); index != indexes_.rend(); ++index) {
    const size_t end = index->Find(text_);
    if (end == 0) continue;
    const size_t length = MatchLength(end);
    if (length > match_length_) {
      match_end_ = end;
      match_length_ = length;
    }
    break;
  }
  if (match_length_ < 2) match_end_ = match_length_ = 0;
}

// The count that brings the most tokens in the time.
size_t LookupDrafter::BestCount(const DraftPrice& price, size_t most) const {
  const auto tokens = static_cast<double>(price.tokens);
  double best = 1 + kLeastGain;
  size_t count = 0;
  double all_right = 1;
  double right = 0;  // expected
  for (size_t i = 0; i < std::min(most, price.extra.size()); ++i) {
    all_right *= right_[ClassOf(match_length_ + i)];
    right += all_right;
    const double gain = (1 + right / tokens) / (1 + price.extra[i]);
    if (gain > best) {
      best = gain;
      count = i + 1;
    }
  }
  return count;
}

size_t LookupDrafter::Propose(std::span<const int32_t> added,
                              const DraftPrice& price,
                              std::span<int32_t> guesses) noexcept {
  if (gave_up_) return 0;
  try {
    text_.insert(text_.end(), added.begin(), added.end());
    for (NgramIndex& index : indexes_) index.Update(text_, kIndexedPerCall);
  } catch (const std::bad_alloc&) {
    *this = {};
    gave_up_ = true;
    return 0;
  }
  Learn(added);
  FindMatch();
  if (match_end_ == 0) return 0;
  const size_t count = BestCount(price, guesses.size());
  // A match that ends less than `count` before the text does is a period of it.
  const size_t period = text_.size() - match_end_;
  for (size_t i = 0; i < count; ++i) {
    guesses[i] = i < period ? text_[match_end_ + i] : guesses[i - period];
  }
  return count;
}

}  // namespace gkv
