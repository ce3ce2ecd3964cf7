#ifndef GEMMAKV_BASE_FP_ENVIRONMENT_H_
#define GEMMAKV_BASE_FP_ENVIRONMENT_H_

#include <cstdint>

namespace gkv {

// Sets the floating-point control state of this thread to IEEE defaults (round
// to nearest, gradual underflow, no traps) and restores the previous state on
// destruction. Other libraries in the process switch flush-to-zero on; results
// must not depend on it. Each thread of ours that computes holds one of these.
// So does each function that computes on a thread of its caller: the makers of
// tables and configurations, the readers of weights and of keys and values, and
// the functions that return embeddings.
class ScopedFpEnvironment {
 public:
  ScopedFpEnvironment();
  ~ScopedFpEnvironment();
  ScopedFpEnvironment(const ScopedFpEnvironment&) = delete;
  ScopedFpEnvironment& operator=(const ScopedFpEnvironment&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_FP_ENVIRONMENT_H_
