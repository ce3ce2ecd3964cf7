#include "base/rounding.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

namespace gkv {
namespace {

TEST(Rounding, Quotients) {
  EXPECT_EQ(CeilDiv(size_t{0}, 16), 0u);
  EXPECT_EQ(CeilDiv(size_t{1}, 16), 1u);
  EXPECT_EQ(CeilDiv(size_t{16}, 16), 1u);
  EXPECT_EQ(CeilDiv(size_t{17}, 16), 2u);
  EXPECT_EQ(CeilDiv(size_t{7}, 1), 7u);
}

TEST(Rounding, Multiples) {
  EXPECT_EQ(RoundUp(size_t{0}, 64), 0u);
  EXPECT_EQ(RoundUp(size_t{1}, 64), 64u);
  EXPECT_EQ(RoundUp(size_t{64}, 64), 64u);
  EXPECT_EQ(RoundUp(uint64_t{100}, 3), 102u);
  static_assert(RoundUp(uint64_t{1} << 40 | 1, 4) == (uint64_t{1} << 40) + 4);
}

}  // namespace
}  // namespace gkv
