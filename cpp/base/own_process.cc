#include "base/own_process.h"

#include <pthread.h>

namespace gkv {

// Initialized as the code is loaded, before any object asks.
std::atomic<uint32_t> OwnProcess::count_ = [] {
  pthread_atfork(nullptr, nullptr, [] {
    count_.fetch_add(1, std::memory_order_relaxed);
  });
  return 0;
}();

}  // namespace gkv
