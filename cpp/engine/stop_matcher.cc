#include "engine/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace gkv {

StopMatcher::StopMatcher(std::vector<std::string> stops)
    : stops_(std::move(stops)) {}

// Invariant: held_ is the longest suffix of the text so far that begins some
// stop string without being one.
std::string StopMatcher::Push(std::string_view piece, bool may_stop) {
  if (stopped_) return {};
  held_ += piece;
  if (!may_stop) passed_ = held_.size();
  size_t found = std::string::npos;
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    // The first that ends behind what has passed.
    const size_t end = std::max(passed_ + 1, stop.size());
    found = std::min(found, held_.find(stop, end - stop.size()));
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  if (found != std::string::npos) {
    stopped_ = true;
    held_.resize(found);
    return std::exchange(held_, {});
  }
  passed_ -= std::min(passed_, held_.size() - keep);
  std::string final_text = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return final_text;
}

std::string StopMatcher::Flush() { return std::exchange(held_, {}); }

}  // namespace gkv
