#ifndef GEMMAKV_ENGINE_LEARNED_H_
#define GEMMAKV_ENGINE_LEARNED_H_

namespace gkv {

// A mean that forgets: what came last counts most. What is noted has the weight
// 1, all that came before it at most `most_weight` less that.
struct LearnedMean {
  double value = 0;
  double weight = 0;
  void Note(double next, double most_weight);
};

// A time that is learned from times that may have been interrupted. Nothing is
// believed of the first alone, which would never be measured again were it too
// high; a later one counts no more than one that took half as long again.
class LearnedTime {
 public:
  LearnedTime() = default;
  // `rate`: weight of the last one.
  explicit LearnedTime(double rate) : rate_(rate) {}

  void Note(double seconds);
  // Forgets all.
  void Restart() { *this = LearnedTime(rate_); }
  double seconds() const { return known_ ? mean_ : 0; }  // 0: not known

 private:
  double rate_ = 0.2;
  double mean_ = 0;
  bool known_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LEARNED_H_
