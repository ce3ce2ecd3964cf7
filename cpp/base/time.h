#ifndef GEMMAKV_BASE_TIME_H_
#define GEMMAKV_BASE_TIME_H_

#include <time.h>

#include <cstdint>

namespace gkv {

// The time in nanoseconds, of whatever clock it was read from.
inline int64_t Nanoseconds(const struct timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace gkv

#endif  // GEMMAKV_BASE_TIME_H_
