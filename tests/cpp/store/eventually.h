#ifndef GEMMAKV_TESTS_STORE_EVENTUALLY_H_
#define GEMMAKV_TESTS_STORE_EVENTUALLY_H_

#include <chrono>
#include <thread>

namespace gkv {

// Waits until `condition` holds. Returns false if it does not within a time
// far above what anything needs.
template <typename Condition>
bool Eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    // The pause of the poll: others run meanwhile.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

}  // namespace gkv

#endif  // GEMMAKV_TESTS_STORE_EVENTUALLY_H_
