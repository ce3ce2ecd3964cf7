#include "engine/lookup_history.h"

#include <algorithm>
#include <iterator>

#include "engine/ngram.h"

namespace gkv {

size_t LookupShares::ClassOf(size_t length) {
  constexpr size_t kFrom[kLengths] = {0, 3, 5, 8, 14, 24};
  return static_cast<size_t>(
      std::upper_bound(std::begin(kFrom), std::end(kFrom), length) -
      std::begin(kFrom) - 1);
}

void LookupShares::Learn(Source source, size_t length, bool was_right,
                         double rate) {
  double& share = right_[static_cast<size_t>(source)][ClassOf(length)];
  share += rate * ((was_right ? 1 : 0) - share);
}

LookupHistory::Text* LookupHistory::Of(uint32_t number) {
  if (number == 0 || texts_.empty()) return nullptr;
  Text& text = texts_[number % kMaxTexts];
  return text.number == number ? &text : nullptr;
}

const LookupHistory::Text* LookupHistory::Of(uint32_t number) const {
  return const_cast<LookupHistory*>(this)->Of(number);
}

// Drops the oldest text.
void LookupHistory::DropOldest() {
  if (Text* text = Of(oldest_)) {
    tokens_ -= text->tokens.size();
    *text = {};
  }
  ++oldest_;
}

uint32_t LookupHistory::Begin() {
  texts_.resize(kMaxTexts);
  for (std::vector<Place>& slots : slots_) slots.resize(kSlots);
  if (next_ == 0) {  // all numbers were used: begin again
    for (Text& text : texts_) text = {};
    for (std::vector<Place>& slots : slots_) slots.assign(kSlots, {});
    tokens_ = 0;
    oldest_ = next_ = 1;
  }
  while (next_ - oldest_ >= kMaxTexts) DropOldest();
  texts_[next_ % kMaxTexts].number = next_;
  return next_++;
}

bool LookupHistory::Append(uint32_t number, std::span<const int32_t> tokens) {
  Text* text = Of(number);
  if (text == nullptr ||
      text->tokens.size() + tokens.size() > kMaxTokens / 2) {
    return false;
  }
  text->tokens.insert(text->tokens.end(), tokens.begin(), tokens.end());
  tokens_ += tokens.size();
  const size_t size = text->tokens.size();
  Index(*text, size - std::min(size, kBehind));
  while (tokens_ > kMaxTokens) DropOldest();
  return true;
}

// The last n-gram is not indexed: nothing follows it.
void LookupHistory::End(uint32_t number) noexcept {
  if (Text* text = Of(number)) {
    Index(*text, text->tokens.size() - std::min<size_t>(1, text->tokens.size()));
  }
}

void LookupHistory::Index(Text& text, size_t end) noexcept {
  for (size_t at = text.indexed + 1; at <= end; ++at) {
    for (size_t i = 0; i < kGrams.size(); ++i) {
      if (at < kGrams[i]) continue;
      const std::span gram(text.tokens.data() + at - kGrams[i], kGrams[i]);
      slots_[i][HashOfTokens(gram) & (kSlots - 1)] = {
          text.number, static_cast<uint32_t>(at)};
    }
  }
  text.indexed = std::max(text.indexed, static_cast<uint32_t>(end));
}

std::pair<LookupHistory::Place, size_t> LookupHistory::Find(
    std::span<const int32_t> tokens) const {
  for (size_t i = kGrams.size(); i-- > 0;) {
    const size_t n = kGrams[i];
    if (slots_[i].empty() || tokens.size() < n) continue;
    const Place place = slots_[i][HashOfTokens(tokens.last(n)) & (kSlots - 1)];
    const size_t length = MatchLength(place, tokens);
    if (length >= n) return {place, length};
  }
  return {};
}

size_t LookupHistory::MatchLength(Place place,
                                  std::span<const int32_t> tokens) const {
  const Text* text = Of(place.text);
  if (text == nullptr) return 0;
  const size_t most =
      std::min({static_cast<size_t>(place.at), tokens.size(), kMaxMatch});
  size_t length = 0;
  while (length < most && text->tokens[place.at - 1 - length] ==
                              tokens[tokens.size() - 1 - length]) {
    ++length;
  }
  return length;
}

std::span<const int32_t> LookupHistory::From(Place place) const {
  const Text* text = Of(place.text);
  if (text == nullptr || place.at > text->tokens.size()) return {};
  return std::span(text->tokens).subspan(place.at);
}

std::shared_ptr<LookupHistory> LookupHistories::Of(const Address& tenant) {
  const MutexLock lock(mutex_);
  const auto found =
      std::find_if(histories_.begin(), histories_.end(),
                   [&](const auto& entry) { return entry.first == tenant; });
  if (found != histories_.end()) {
    histories_.splice(histories_.begin(), histories_, found);
  } else {
    histories_.emplace_front(tenant, std::make_shared<LookupHistory>());
    if (histories_.size() > kMaxTenants) histories_.pop_back();
  }
  return histories_.front().second;
}

}  // namespace gkv
