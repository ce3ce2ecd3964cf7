#include "base/time.h"

#include <gtest/gtest.h>

namespace gkv {
namespace {

TEST(TimeTest, ThereAndBack) {
  for (const int64_t time :
       {int64_t{0}, int64_t{1}, kSecondNs - 1, kSecondNs,
        int64_t{1'700'000'000'123'456'789}}) {
    const struct timespec spec = TimespecOf(time);
    EXPECT_EQ(spec.tv_sec, time / kSecondNs);
    EXPECT_LT(spec.tv_nsec, kSecondNs);
    EXPECT_EQ(Nanoseconds(spec), time);
  }
}

TEST(TimeTest, NowIsTheClockOfFiles) {
  struct timespec before, after;
  ASSERT_EQ(clock_gettime(CLOCK_REALTIME, &before), 0);
  const int64_t now = WallClockNs();
  ASSERT_EQ(clock_gettime(CLOCK_REALTIME, &after), 0);
  EXPECT_LE(Nanoseconds(before), now);
  EXPECT_LE(now, Nanoseconds(after));
}

}  // namespace
}  // namespace gkv
