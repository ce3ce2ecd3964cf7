#ifndef GEMMAKV_ENGINE_STOP_MATCHER_H_
#define GEMMAKV_ENGINE_STOP_MATCHER_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace gkv {

// Finds stop strings in text that arrives in pieces, and holds back text that
// may still become part of one. With no stop strings, passes text through.
class StopMatcher {
 public:
  // `reply_stops` are not searched in the white space that the text begins
  // with: they are for a reply that is shown without it. Requires: no empty
  // string.
  explicit StopMatcher(std::vector<std::string> stops = {},
                       std::vector<std::string> reply_stops = {});

  // Takes the next piece and returns the text that is final now. Once a stop
  // string is complete, the text before its first occurrence has been returned
  // and nothing more is. A stop string that is complete without `may_stop` is
  // text like any other.
  std::string Push(std::string_view piece, bool may_stop = true);
  // Ends the text and returns what was held back.
  std::string Flush();
  bool stopped() const { return stopped_; }

 private:
  // Counts the white space at the beginning of held_ into space_.
  void SkipSpace();

  std::vector<std::string> stops_;  // those of replies last
  size_t whole_;                    // how many of them are for the whole text
  std::string held_;
  size_t passed_ = 0;  // bytes of held_ in which no stop string counts
  size_t space_ = 0;   // bytes of held_ in which no stop of a reply begins
  bool in_space_;      // the text so far is white space
  bool stopped_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STOP_MATCHER_H_
