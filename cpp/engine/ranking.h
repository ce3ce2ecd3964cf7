#ifndef GEMMAKV_ENGINE_RANKING_H_
#define GEMMAKV_ENGINE_RANKING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/logits.h"

namespace gkv {

// A softmax up to its normalization: the likeliest token has the weight 1.
struct Softmax {
  float max;  // the largest logit
  float inverse_temperature;
};

// The likelier tokens of one row of logits in descending order of logit,
// ascending id among equals. It divides them into bins of logits and sorts a
// bin only when an answer lies within it: the cost of an answer hardly depends
// on how many tokens come before it. It keeps its memory for the next row: 16
// bytes for each token of the largest row.
//
// Sums of weights are taken bin by bin. As doubles they are exact, and so do
// not depend on the bins, while no weight is below 2^-29 of the sum. The weight
// of a token within the first 99.95 % of the mass of 262,144 tokens never is.
class Ranking {
 public:
  // Ranks the tokens of `logits` with a logit of at least `floor`; there should
  // be at least one. Throws std::bad_alloc only.
  void Reset(std::span<const float> logits, const Softmax& softmax,
             float floor);

  // The same for tokens by ascending id.
  void Reset(const TokenList& tokens, const Softmax& softmax, float floor);

  size_t size() const { return tokens_.ids.size(); }
  double mass() const { return up_to_.back().mass; }  // of all
  // Returns how many tokens weigh at least `weight`.
  size_t CountFrom(float weight) const;

  struct Prefix {
    size_t count;
    double mass;
    int32_t last;  // id
  };
  // Returns the shortest prefix of the order that has `count` tokens or a mass
  // of at least `mass`. Requires: 0 < count <= size(), 0 < mass.
  Prefix Find(size_t count, double mass);

 private:
  struct Sum {
    size_t count;
    double mass;
  };
  void Divide(const Softmax& softmax, float floor);
  void SortBin(size_t bin);

  TokenList tokens_;
  std::vector<float> weights_;
  std::vector<int32_t> bin_of_;
  std::vector<Sum> up_to_;        // the end of each bin
  std::vector<uint32_t> sorted_;  // indexes of one bin's tokens
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_RANKING_H_
