#ifndef GEMMAKV_OPS_ROPE_H_
#define GEMMAKV_OPS_ROPE_H_

#include <cstddef>
#include <vector>

#include "ops/double_double.h"

namespace gkv {

struct Rotation {
  DoubleDouble cos = 1;
  DoubleDouble sin = 0;
};

// Cosines and sines of rotary position embeddings (Su et al., 2021) for one
// base frequency. The angle of pair i at position p is p / factor * base^(-2 i
// / head_dim); the last pairs may stand still instead, at angle 0. They are
// computed by the four basic operations alone (no math library), so every
// machine has the same bits. Before it is rounded to float, a result is within
// 1e-15. A table grows to the positions that are used; no value depends on its
// size.
class RopeTable {
 public:
  // `factor` is the linear scaling of positions (1: none). Throws
  // InvalidArgument unless head_dim is even and positive, base > 1,
  // factor >= 1 and still_pairs <= head_dim / 2.
  RopeTable(double base, double factor, size_t head_dim,
            size_t still_pairs = 0);

  // Makes positions below `positions` available, and some more. Throws
  // std::bad_alloc and then changes nothing. Must not run at the same time as
  // CosSin.
  void Reserve(size_t positions);
  // Returns the number of positions that are available.
  size_t positions() const { return high_cos_.size() / half_ * kLow; }

  // Writes head_dim / 2 cosines and sines. Requires: position < positions().
  // Cost: about one microsecond for head_dim 256.
  void CosSin(size_t position, float* cos, float* sin) const;

  // Whether both have the same positions and, bit for bit, the same values,
  // which are more exact than what CosSin writes.
  bool Equals(const RopeTable& other) const {
    return low_cos_ == other.low_cos_ && low_sin_ == other.low_sin_ &&
           high_cos_ == other.high_cos_ && high_sin_ == other.high_sin_;
  }

 private:
  // Position p = kLow * a + b is the product of two tabulated rotations.
  static constexpr size_t kLow = 256;
  size_t half_;                  // head_dim / 2
  std::vector<Rotation> steps_;  // [half], the rotation by kLow positions
  std::vector<double> low_cos_, low_sin_;    // [kLow, half]
  std::vector<double> high_cos_, high_sin_;  // [positions / kLow, half]
};

}  // namespace gkv

#endif  // GEMMAKV_OPS_ROPE_H_
