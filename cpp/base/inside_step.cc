#include "base/inside_step.h"

#include <pthread.h>

namespace gkv {
namespace {

thread_local const void* runner_of_this = nullptr;

}  // namespace

InsideStep::InsideStep(const void* runner) noexcept : before_(runner_of_this) {
  [[maybe_unused]] static const int once =
      pthread_atfork(nullptr, nullptr, +[] { runner_of_this = nullptr; });
  runner_of_this = runner;
}

// In a child of fork() this thread works for no step any more.
InsideStep::~InsideStep() {
  if (runner_of_this != nullptr) runner_of_this = before_;
}

const void* InsideStep::Runner() noexcept { return runner_of_this; }

}  // namespace gkv
