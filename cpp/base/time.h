#ifndef GEMMAKV_BASE_TIME_H_
#define GEMMAKV_BASE_TIME_H_

#include <time.h>

#include <chrono>
#include <cstdint>

// Times as one number: nanoseconds since 1970, or of whatever clock they were
// read from.

namespace gkv {

inline constexpr int64_t kSecondNs = 1'000'000'000;

inline int64_t Nanoseconds(const struct timespec& time) {
  return int64_t{time.tv_sec} * kSecondNs + time.tv_nsec;
}

// The reverse. Requires: nanoseconds >= 0.
inline struct timespec TimespecOf(int64_t nanoseconds) {
  struct timespec time = {};
  time.tv_sec = static_cast<time_t>(nanoseconds / kSecondNs);
  time.tv_nsec = nanoseconds % kSecondNs;
  return time;
}

// Returns the time of the clock from which file systems take the times of
// files. It may be set back.
inline int64_t WallClockNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_TIME_H_
