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

// The reverse, of a time that is not negative.
inline struct timespec TimespecOf(int64_t nanoseconds) {
  struct timespec time = {};
  time.tv_sec = static_cast<time_t>(nanoseconds / kSecondNs);
  time.tv_nsec = nanoseconds % kSecondNs;
  return time;
}

// Now, by the clock that file systems take the times of files from, which may
// be put back.
inline int64_t WallClockNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_TIME_H_
