#include "engine/lookup_drafter.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <new>

#include "engine/ngram.h"

namespace gkv {
namespace {

// The most tokens of a long prompt that one call takes in: while a step reads a
// prompt, which takes a hundred times as long, and while it decodes.
constexpr size_t kTakenWhileReading = 1024;
constexpr size_t kTakenWhileDecoding = 512;
// Guesses that are less likely, together with all before them, are left out.
constexpr double kLeastReach = 0.02;
// Weight of the last guess in a learned share: in one request, and over all.
constexpr double kRequestRate = 0.08;
constexpr double kSharedRate = 0.02;

}  // namespace

size_t NgramIndex::SlotOf(std::span<const int32_t> text, size_t end) const {
  const std::span<const int32_t> gram = text.subspan(end - n_, n_);
  size_t slot = HashOfTokens(gram) & (slots_.size() - 1);
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
  // The last n-gram would hide its earlier occurrence.
  for (; end_ < text.size() && most > 0; ++end_, --most) {
    slots_[SlotOf(text, end_)] = static_cast<uint32_t>(end_);
  }
}

size_t NgramIndex::Find(std::span<const int32_t> text) const {
  if (text.size() < n_ || slots_.empty()) return 0;
  return slots_[SlotOf(text, text.size())];
}

// Takes in new tokens. Returns false if there is no memory, now and later.
bool LookupDrafter::Take(std::span<const int32_t> added, size_t most) noexcept {
  if (gave_up_) return false;
  try {
    text_.insert(text_.end(), added.begin(), added.end());
    for (NgramIndex& index : indexes_) index.Update(text_, most);
    return true;
  } catch (const std::bad_alloc&) {
    *this = {};
    gave_up_ = true;
    return false;
  }
}

// Appends to the history what it lacks. Throws std::bad_alloc.
void LookupDrafter::Write(size_t most) {
  if (!sharing_.history || !sharing_.writes) return;
  LookupHistory& history = *sharing_.history;
  size_t count = std::min(most, text_.size() - written_);
  const auto next = [&] { return std::span(text_).subspan(written_, count); };
  if (written_text_ == 0 || !history.Append(written_text_, next())) {
    // The tokens before the cut are needed for matches across it.
    const size_t before =
        written_text_ == 0 ? 0 : std::min(written_, LookupHistory::kMaxMatch);
    written_ -= before;
    count += before;
    history.End(written_text_);
    written_text_ = history.Begin();
    history.Append(written_text_, next());
  }
  written_ += count;
}

// Compares the new tokens with what would have been guessed.
void LookupDrafter::Learn(std::span<const int32_t> added) {
  if (match_.length == 0) return;
  const bool own = match_.source == Source::kOwn;
  std::span<const int32_t> expected;
  if (own) {
    expected = std::span(text_).subspan(match_.end);
  } else {
    expected = sharing_.history->From(match_.place);
  }
  for (size_t i = 0; i < added.size(); ++i) {
    if (i == expected.size()) {
      match_ = {};
      return;
    }
    const bool was_right = expected[i] == added[i];
    const size_t length = match_.length + i;
    shares_.Learn(match_.source, length, was_right, kRequestRate);
    if (sharing_.history && sharing_.writes) {
      sharing_.history->shares().Learn(match_.source, length, was_right,
                                       kSharedRate);
    }
    if (!was_right) {
      match_ = {};
      return;
    }
  }
  match_.end += added.size();
  match_.place.at += static_cast<uint32_t>(added.size());
}

// Returns how many tokens before `end` are equal to the last ones of the text.
size_t LookupDrafter::MatchLength(size_t end) const {
  const size_t most = std::min(end, LookupHistory::kMaxMatch);
  size_t length = 0;
  while (length < most &&
         text_[end - 1 - length] == text_[text_.size() - 1 - length]) {
    ++length;
  }
  return length;
}

void LookupDrafter::FindMatch() {
  LookupHistory* const history =
      sharing_.reads ? sharing_.history.get() : nullptr;
  // A match that goes on stays, unless a better one is known.
  if (match_.length > 0) {
    match_.length = match_.source == Source::kOwn
                        ? MatchLength(match_.end)
                        : history->MatchLength(match_.place, text_);
  }
  for (auto index = indexes_.rbegin(); index != indexes_.rend(); ++index) {
    const size_t end = index->Find(text_);
    if (end == 0) continue;
    const Match found = {.length = MatchLength(end), .end = end};
    const bool better = match_.source == Source::kOwn
                            ? found.length > match_.length
                            : Right(found, 0) >= Right(match_, 0);
    if (better) match_ = found;
    break;
  }
  if (match_.length < 2) match_ = {};
  if (history == nullptr) return;
  const auto [place, length] = history->Find(text_);
  if (length <= match_.length || place.text == written_text_) return;
  const Match found = {
      .source = Source::kOther, .length = length, .place = place};
  if (match_.length == 0 || match_.source == Source::kOther ||
      Right(found, 0) > Right(match_, 0)) {
    match_ = found;
  }
}

// The history already has the tokens that earlier requests read.
void LookupDrafter::Begin(size_t known) {
  if (std::exchange(began_, true)) return;
  written_ = known - std::min(known, LookupHistory::kMaxMatch);
  if (sharing_.history && sharing_.reads) shares_ = sharing_.history->shares();
}

void LookupDrafter::Read(std::span<const int32_t> added,
                         size_t known) noexcept {
  Begin(known);
  if (!Take(added, kTakenWhileReading)) return;
  try {
    Write(kTakenWhileReading);
  } catch (const std::bad_alloc&) {
    sharing_ = {};  // it continues without
    match_ = {};
  }
}

size_t LookupDrafter::Propose(std::span<const int32_t> added,
                              std::span<DraftGuess> guesses) noexcept {
  Begin(0);
  if (!Take(added, kTakenWhileDecoding)) return 0;
  Learn(added);
  FindMatch();
  try {
    // After the search, which must not find the very tokens that it searches
    // for.
    Write(kTakenWhileDecoding);
  } catch (const std::bad_alloc&) {
    sharing_ = {};
    if (match_.source == Source::kOther) match_ = {};
  }
  if (match_.length == 0) return 0;
  const bool own = match_.source == Source::kOwn;
  std::span<const int32_t> follows;
  if (!own) follows = sharing_.history->From(match_.place);
  // A match that ends less than this before the end of the text is a period of
  // it.
  const size_t period = own ? text_.size() - match_.end : follows.size();
  double reach = 1;
  size_t count = 0;
  for (; count < guesses.size(); ++count) {
    if (!own && count == period) break;
    const double right = Right(match_, count);
    reach *= right;
    if (reach < kLeastReach) break;
    const int32_t id = count >= period ? guesses[count - period].id
                       : own           ? text_[match_.end + count]
                                       : follows[count];
    guesses[count] = {id, right};
  }
  return count;
}

void LookupDrafter::End(std::span<const int32_t> added) noexcept {
  if (!sharing_.history || !sharing_.writes || !began_) return;
  try {
    text_.insert(text_.end(), added.begin(), added.end());
    Write(kTakenWhileReading);
  } catch (const std::bad_alloc&) {
    // Others do without the last tokens.
  }
  sharing_.history->End(written_text_);
}

}  // namespace gkv
