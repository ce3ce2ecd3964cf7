#ifndef GEMMAKV_TESTS_OPS_EVERY_TARGET_H_
#define GEMMAKV_TESTS_OPS_EVERY_TARGET_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "ops/target.h"

namespace gkv {

// The bits of `values`; those of every NaN are made the same, since which NaN
// an operation returns is not part of any contract.
inline std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) {
    bits.push_back(std::isnan(value) ? 0x7FC00000u
                                     : std::bit_cast<uint32_t>(value));
  }
  return bits;
}

// Runs a check on each SIMD target that this processor has.
class EveryTargetTest : public ::testing::Test {
 protected:
  void TearDown() override { ForceTarget(""); }

  template <typename Fn>
  void OnEveryTarget(const Fn& fn) {
    for (const std::string& name : AttainableTargets()) {
      SCOPED_TRACE(name);
      ForceTarget(name);
      fn();
      if (HasFatalFailure()) return;
    }
    ForceTarget("");
  }

  // fn() returns a vector<float>, which must be the same on all targets that
  // share an arithmetic.
  template <typename Fn>
  void ExpectSameBits(const Fn& fn) {
    std::map<uint32_t, std::vector<uint32_t>> first;  // by numerics id
    OnEveryTarget([&] {
      const std::vector<uint32_t> bits = Bits(fn());
      ASSERT_FALSE(bits.empty());
      std::vector<uint32_t>& expected = first[NumericsId()];
      if (expected.empty()) expected = bits;
      ASSERT_EQ(bits.size(), expected.size());
      for (size_t i = 0; i < bits.size(); ++i) {
        ASSERT_EQ(bits[i], expected[i]) << "at " << i;
      }
    });
  }
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_OPS_EVERY_TARGET_H_
