#ifndef GEMMAKV_OPS_DOUBLE_DOUBLE_H_
#define GEMMAKV_OPS_DOUBLE_DOUBLE_H_

// Numbers of about 100 bits, made of the basic operations on double alone, so
// that every machine has the same bits (long double differs between them). They
// rely on rounding to nearest and on products that are not fused into sums, and
// are for values far from overflow and underflow.

namespace gkv {

// The sum of two doubles, of which `low` is the rounding error of `high`.
struct DoubleDouble {
  double high = 0;
  double low = 0;

  constexpr DoubleDouble() = default;
  constexpr DoubleDouble(double value) : high(value) {}  // NOLINT: exact
  constexpr DoubleDouble(double high, double low) : high(high), low(low) {}
};

// Returns the exact sum. Requires: |a| >= |b|, or a is 0.
constexpr DoubleDouble OrderedSum(double a, double b) {
  const double sum = a + b;
  return {sum, b - (sum - a)};
}

// Returns the exact sum (Knuth).
constexpr DoubleDouble ExactSum(double a, double b) {
  const double sum = a + b;
  const double from_b = sum - a;
  return {sum, (a - (sum - from_b)) + (b - from_b)};
}

// Returns the exact product (Dekker): products of the halves of 26 bits have no
// rounding error.
constexpr DoubleDouble ExactProduct(double a, double b) {
  constexpr double kSplitter = 134217729.0;  // 2^27 + 1
  const double ta = kSplitter * a, tb = kSplitter * b;
  const double a1 = ta - (ta - a), a2 = a - a1;
  const double b1 = tb - (tb - b), b2 = b - b1;
  const double product = a * b;
  return {product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2};
}

constexpr DoubleDouble operator+(const DoubleDouble& a, const DoubleDouble& b) {
  const DoubleDouble sum = ExactSum(a.high, b.high);
  return OrderedSum(sum.high, sum.low + (a.low + b.low));
}

constexpr DoubleDouble operator-(const DoubleDouble& a) {
  return {-a.high, -a.low};
}

constexpr DoubleDouble operator-(const DoubleDouble& a, const DoubleDouble& b) {
  return a + -b;
}

constexpr DoubleDouble operator*(const DoubleDouble& a, const DoubleDouble& b) {
  const DoubleDouble product = ExactProduct(a.high, b.high);
  return OrderedSum(product.high,
                    product.low + (a.high * b.low + a.low * b.high));
}

// Computes two digits of the quotient and a correction.
constexpr DoubleDouble operator/(const DoubleDouble& a, const DoubleDouble& b) {
  const double first = a.high / b.high;
  const DoubleDouble rest = a - b * first;
  const double second = rest.high / b.high;
  const double third = (rest - b * second).high / b.high;
  return OrderedSum(first, second) + third;
}

}  // namespace gkv

#endif  // GEMMAKV_OPS_DOUBLE_DOUBLE_H_
