#ifndef GEMMAKV_ENGINE_LEARNED_H_
#define GEMMAKV_ENGINE_LEARNED_H_

namespace gkv {

// A mean in which the last values count most: a new value has the weight 1, all
// values before it at most `most_weight` less 1.
struct LearnedMean {
  double value = 0;
  double weight = 0;
  void Note(double next, double most_weight);
};

// A mean of measured times, some of which may have been interrupted. The first
// time alone is not believed: were it too high, it would never be measured
// again. A later time counts for at most one and a half times the mean.
class LearnedTime {
 public:
  LearnedTime() = default;
  // `rate`: the weight of the last time.
  explicit LearnedTime(double rate) : rate_(rate) {}

  void Note(double seconds);
  // Forgets everything.
  void Restart() { *this = LearnedTime(rate_); }
  double seconds() const { return known_ ? mean_ : 0; }  // 0: not known

 private:
  double rate_ = 0.2;
  double mean_ = 0;
  bool known_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_LEARNED_H_
