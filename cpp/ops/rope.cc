#include "ops/rope.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/fp_environment.h"
#include "ops/double_double.h"

// The angle at position 131071 has 131071 times the error of the frequency, so
// double alone would leave an error of 1e-10. All steps up to the tables have
// twice its precision.

namespace gkv {
namespace {

// Returns artanh(t) for |t| <= 1 / 3: the sum of the odd powers of t over their
// exponents.
DoubleDouble Artanh(DoubleDouble t) {
  const DoubleDouble square = t * t;
  DoubleDouble sum = 0, power = t;
  for (int n = 1; n < 72; n += 2) {
    sum = sum + power / n;
    power = power * square;
  }
  return sum;
}

// Returns the natural logarithm of x > 1: x = m * 2^e with m in [0.7, 1.4], and
// ln(m) = 2 artanh((m - 1) / (m + 1)).
DoubleDouble Log(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);  // exact
  if (m < 0.70710678) {
    m *= 2;
    --exponent;
  }
  const DoubleDouble ln2 = Artanh(DoubleDouble(1) / 3) * 2;
  const DoubleDouble t = (DoubleDouble(m) - 1) / (DoubleDouble(m) + 1);
  return ln2 * exponent + Artanh(t) * 2;
}

// Returns e^-x for x >= 0: the series at x / 2^k, squared k times.
DoubleDouble ExpMinus(DoubleDouble x) {
  int halvings = 0;
  for (; x.high > 0.03125; x = x * 0.5) ++halvings;
  DoubleDouble term = 1, sum = 1;
  for (int n = 1; n < 18; ++n) {
    term = term * -x / n;
    sum = sum + term;
  }
  for (int i = 0; i < halvings; ++i) sum = sum * sum;
  return sum;
}

Rotation operator*(const Rotation& a, const Rotation& b) {
  return {a.cos * b.cos - a.sin * b.sin, a.sin * b.cos + a.cos * b.sin};
}

// Returns the rotation by an angle in [0, 1], by Taylor series.
Rotation RotationBy(DoubleDouble angle) {
  Rotation rotation;
  DoubleDouble term = 1;
  for (int n = 1; n < 32; ++n) {
    term = term * angle / n;
    DoubleDouble& sum = n % 2 == 0 ? rotation.cos : rotation.sin;
    sum = n % 4 < 2 ? sum + term : sum - term;
  }
  return rotation;
}

// Returns base^0 ... base^(count - 1), each as a product of binary powers. So
// an error grows with the logarithm of the exponent only, and no value depends
// on count.
std::vector<Rotation> Powers(const Rotation& base, size_t count) {
  std::vector<Rotation> powers(count);
  Rotation binary = base;
  for (size_t bit = 1; bit < count; bit *= 2) {
    for (size_t i = bit; i < count && i < 2 * bit; ++i) {
      powers[i] = powers[i - bit] * binary;
    }
    binary = binary * binary;
  }
  return powers;
}

}  // namespace

RopeTable::RopeTable(double base, double factor, size_t head_dim,
                     size_t still_pairs)
    : half_(head_dim / 2) {
  const ScopedFpEnvironment fp_environment;
  if (head_dim == 0 || head_dim % 2 != 0) {
    throw InvalidArgument(
        Unexpected("rope: head_dim", "a positive even number", head_dim));
  }
  if (!(base > 1) || !std::isfinite(base)) {
    throw InvalidArgument(
        Unexpected("rope: base", "a finite number > 1", base));
  }
  if (!(factor >= 1) || !std::isfinite(factor)) {
    throw InvalidArgument(
        Unexpected("rope: factor", "a finite number >= 1", factor));
  }
  if (still_pairs > half_) {
    throw InvalidArgument(Unexpected("rope: still_pairs",
                                     StrCat("at most ", half_), still_pairs));
  }
  low_cos_.resize(kLow * half_);
  low_sin_.resize(kLow * half_);
  steps_.resize(half_);
  const DoubleDouble log_base = Log(base);
  for (size_t i = 0; i < half_; ++i) {
    const DoubleDouble exponent =
        log_base * static_cast<double>(2 * i) / static_cast<double>(head_dim);
    const DoubleDouble frequency =
        i < half_ - still_pairs ? ExpMinus(exponent) / factor : DoubleDouble(0);
    const std::vector<Rotation> low = Powers(RotationBy(frequency), kLow + 1);
    for (size_t p = 0; p < kLow; ++p) {
      low_cos_[p * half_ + i] = low[p].cos.high;
      low_sin_[p * half_ + i] = low[p].sin.high;
    }
    steps_[i] = low[kLow];
  }
  Reserve(kLow);
}

void RopeTable::Reserve(size_t positions) {
  if (positions <= this->positions()) return;
  const ScopedFpEnvironment fp_environment;
  // The table doubles, so the work of computing all rows anew stays in
  // proportion to what is used.
  const size_t rows = std::max((positions - 1) / kLow + 1,
                               2 * (this->positions() / kLow));
  std::vector<double> cos(rows * half_), sin(rows * half_);
  for (size_t i = 0; i < half_; ++i) {
    const std::vector<Rotation> high = Powers(steps_[i], rows);
    for (size_t p = 0; p < rows; ++p) {
      cos[p * half_ + i] = high[p].cos.high;
      sin[p * half_ + i] = high[p].sin.high;
    }
  }
  high_cos_.swap(cos);
  high_sin_.swap(sin);
}

void RopeTable::CosSin(size_t position, float* cos, float* sin) const {
  const size_t low = position % kLow * half_;
  const size_t high = position / kLow * half_;
  for (size_t i = 0; i < half_; ++i) {
    const double lc = low_cos_[low + i], ls = low_sin_[low + i];
    const double hc = high_cos_[high + i], hs = high_sin_[high + i];
    cos[i] = static_cast<float>(hc * lc - hs * ls);
    sin[i] = static_cast<float>(hs * lc + hc * ls);
  }
}

}  // namespace gkv
