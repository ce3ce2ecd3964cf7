#ifndef GEMMAKV_ENGINE_SCHEDULER_OPTIONS_H_
#define GEMMAKV_ENGINE_SCHEDULER_OPTIONS_H_

#include <cstddef>
#include <limits>

namespace gkv {

// What the scheduler of a model may take on. Results depend on none of it.
struct SchedulerOptions {
  // Rows that one step takes at most, >= 2; more only for a span that must not
  // be cut.
  size_t step_rows = 128;
  // Prefill rows that join a step that also decodes: bounds how long a running
  // conversation waits for its next token while others read long prompts.
  size_t prefill_rows_while_decoding = 64;
  // Rows of logits that one step computes at most, >= 2: bounds the extra
  // memory.
  size_t logits_rows = 32;
  // Guesses of a drafter that one step takes for a sequence at most; at most
  // three quarters of logits_rows, less one.
  size_t max_guesses = 7;
  // Requests that run at the same time; those that wait for their readers do
  // not count. The others wait, the first come first.
  size_t max_running = 256;
  // Requests beyond max_running that are taken on; more are refused with
  // QueueFull.
  size_t max_queued = std::numeric_limits<size_t>::max() / 2;

  // Throws InvalidArgument naming the option, what it is and what it may be.
  void Validate() const;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SCHEDULER_OPTIONS_H_
