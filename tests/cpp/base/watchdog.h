#ifndef GEMMAKV_TESTS_BASE_WATCHDOG_H_
#define GEMMAKV_TESTS_BASE_WATCHDOG_H_

#include <unistd.h>

namespace gkv {

// While it lives, a test that hangs ends its process, and so fails.
class Watchdog {
 public:
  Watchdog() { alarm(120); }
  ~Watchdog() { alarm(0); }
  Watchdog(const Watchdog&) = delete;
};

}  // namespace gkv

#endif  // GEMMAKV_TESTS_BASE_WATCHDOG_H_
