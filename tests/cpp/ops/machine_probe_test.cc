#include "ops/machine_probe.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

class MachineProbeTest : public EveryTargetTest {};

TEST_F(MachineProbeTest, ReadsEveryByte) {
  std::mt19937_64 rng(1);
  for (const size_t size : {1024, 4096, 5120}) {
    std::vector<uint8_t> bytes(size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
    uint64_t expected = 0;
    for (size_t i = 0; i < size; i += 8) {
      uint64_t word;
      std::memcpy(&word, &bytes[i], 8);
      expected ^= word;
    }
    OnEveryTarget([&] { EXPECT_EQ(XorSum(bytes), expected); });
  }
  EXPECT_EQ(XorSum({}), 0u);
}

// Work that the compiler left out would be faster than anything can be.
TEST_F(MachineProbeTest, RatesArePossible) {
  for (const size_t threads : {1, 2}) {
    MachineProbe probe(threads);
    OnEveryTarget([&] {
      const double n = static_cast<double>(threads);
      const double read = probe.ReadBytesPerSecond();
      EXPECT_GT(read, 0);
      EXPECT_LT(read, n * 1e12);
      const double int8 = probe.Int8OpsPerSecond();
      EXPECT_GT(int8, 0);
      EXPECT_LT(int8, n * 1e13);
      const double floats = probe.FloatOpsPerSecond();
      EXPECT_GT(floats, 0);
      EXPECT_LT(floats, n * 2e12);
    });
  }
}

}  // namespace
}  // namespace gkv
