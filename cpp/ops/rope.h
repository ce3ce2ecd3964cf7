#ifndef GEMMAKV_OPS_ROPE_H_
#define GEMMAKV_OPS_ROPE_H_

#include <cstddef>
#include <vector>

namespace gkv {

// Cosines and sines of rotary position embeddings (Su et al., 2021) for one
// base frequency: the angle of pair i at position p is
// p / factor * base^(-2 i / head_dim). Computed by the four basic operations
// alone (no math library), so that every machine has the same bits; before it
// is rounded to float, a result is within 1e-15. Immutable after construction.
class RopeTable {
 public:
  // `factor` is the linear scaling of positions (1: none). Throws
  // InvalidArgument unless head_dim is even and positive, base > 1,
  // factor >= 1 and max_positions > 0.
  RopeTable(double base, double factor, size_t head_dim, size_t max_positions);

  // Writes head_dim / 2 cosines and sines. Requires: position < max_positions.
  // Cost: about one microsecond for head_dim 256.
  void CosSin(size_t position, float* cos, float* sin) const;

  size_t max_positions() const { return max_positions_; }

 private:
  size_t half_;           // head_dim / 2
  size_t max_positions_;
  // Position p = kLow * a + b is the product of two tabulated rotations.
  static constexpr size_t kLow = 256;
  std::vector<double> low_cos_, low_sin_;    // [kLow, half]
  std::vector<double> high_cos_, high_sin_;  // [ceil(max / kLow), half]
};

}  // namespace gkv

#endif  // GEMMAKV_OPS_ROPE_H_
