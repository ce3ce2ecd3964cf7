#include "engine/stop_matcher.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace gkv {
namespace {

// The characters beyond ASCII that Python's str.strip() removes.
constexpr std::string_view kSpaces[] = {
    "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\xA8",
    "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80",
};

// Returns the length of the white space character that the text begins with; 0
// if there is none, or it is incomplete.
size_t SpaceSize(std::string_view text) {
  if (text.empty()) return 0;
  const char first = text[0];
  if (first == ' ' || (first >= '\t' && first <= '\r') ||
      (first >= '\x1C' && first <= '\x1F')) {
    return 1;
  }
  for (const std::string_view space : kSpaces) {
    if (text.starts_with(space)) return space.size();
  }
  // U+2000 to U+200A.
  const bool wide = text.size() >= 3 && text.starts_with("\xE2\x80") &&
                    static_cast<unsigned char>(text[2]) <= 0x8A;
  return wide ? 3 : 0;
}

// Whether more bytes may turn the text into white space.
bool MayBecomeSpace(std::string_view text) {
  if (text == "\xE2\x80") return true;
  return std::any_of(
      std::begin(kSpaces), std::end(kSpaces),
      [&](std::string_view space) { return space.starts_with(text); });
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stops,
                         std::vector<std::string> reply_stops)
    : stops_(std::move(stops)),
      whole_(stops_.size()),
      in_space_(!reply_stops.empty()) {
  stops_.insert(stops_.end(), std::make_move_iterator(reply_stops.begin()),
                std::make_move_iterator(reply_stops.end()));
}

void StopMatcher::SkipSpace() {
  while (const size_t size =
             SpaceSize(std::string_view(held_).substr(space_))) {
    space_ += size;
  }
  in_space_ = MayBecomeSpace(std::string_view(held_).substr(space_));
}

// Invariant: held_ is the longest suffix of the text so far that begins some
// stop string without being one, or may begin white space that a reply begins
// with.
std::string StopMatcher::Push(std::string_view piece, bool may_stop) {
  if (stopped_) return {};
  held_ += piece;
  if (!may_stop) passed_ = held_.size();
  if (in_space_) SkipSpace();
  size_t found = std::string::npos;
  size_t keep = in_space_ ? held_.size() - space_ : 0;
  for (size_t i = 0; i < stops_.size(); ++i) {
    const std::string& stop = stops_[i];
    const size_t begin = i < whole_ ? 0 : space_;
    // The first occurrence that ends after what has passed.
    const size_t end = std::max(passed_ + 1, stop.size());
    found =
        std::min(found, held_.find(stop, std::max(begin, end - stop.size())));
    const size_t left = held_.size() - begin;
    for (size_t n = std::min(stop.size() - 1, left); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  if (found != std::string::npos) {
    stopped_ = true;
    held_.resize(found);
    return std::exchange(held_, {});
  }
  passed_ -= std::min(passed_, held_.size() - keep);
  space_ -= std::min(space_, held_.size() - keep);
  std::string final_text = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return final_text;
}

std::string StopMatcher::Flush() { return std::exchange(held_, {}); }

}  // namespace gkv
