#ifndef GEMMAKV_ENGINE_SCHEDULER_H_
#define GEMMAKV_ENGINE_SCHEDULER_H_

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "engine/request.h"
#include "model/forward.h"

namespace gkv {

// Rows that one step takes at most.
inline constexpr size_t kMaxStepRows = 128;
// Prefill rows that join a step that also decodes: bounds how long a running
// conversation waits for its next token while others read long prompts.
inline constexpr size_t kPrefillRowsWhileDecoding = 64;
// Rows of logits that one step computes at most: bounds the extra memory.
inline constexpr size_t kMaxLogitsRows = 32;

// Rows [begin, end) of one request in the next step.
struct PlannedSlice {
  size_t request;  // index into the planned requests
  size_t begin;
  size_t end;
};

// What PlanStep needs to know of a request.
struct PlanInput {
  size_t next;
  size_t target;
  size_t logits_begin;  // rows from here on want logits
  bool decoding;
};

// How many rows of [begin, end) want logits.
constexpr size_t LogitsRows(size_t logits_begin, size_t begin, size_t end) {
  const size_t first = logits_begin > begin ? logits_begin : begin;
  return end > first ? end - first : 0;
}

// Chooses the rows of the next step. Every decoding request gets its row (the
// rotation decides who waits if there are more than kMaxStepRows); what is left
// of the row budget is shared evenly among the prefilling ones, so that a short
// prompt never waits for the whole of a long one. Pure.
std::vector<PlannedSlice> PlanStep(std::span<const PlanInput> requests,
                                   size_t rotation);

// One thread that drives all requests of a model: merges whatever waits into
// steps, runs them, hands out tokens. Requests join and leave between steps.
class Scheduler {
 public:
  Scheduler(std::shared_ptr<const Model> model, size_t num_threads);
  // Cancels what is running and waits for the thread.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;

  // Starts driving the requests, all of them from the same step on.
  // Thread-safe.
  void Submit(std::span<const std::shared_ptr<Request>> requests);

  size_t num_threads() const { return num_threads_; }
  // Steps run so far: tests see merging by it.
  size_t steps() const { return steps_.load(); }
  // Parallel loops that these steps took.
  size_t joins() const { return pool_->joins(); }

 private:
  void Loop();
  void DropEnded();
  bool HasWork() const;
  void RunStep();
  std::vector<PlannedSlice> Plan();
  void Deliver(std::span<const PlannedSlice> plan, std::span<KvStepView> views);

  const std::shared_ptr<const Model> model_;
  const size_t num_threads_;
  std::atomic<size_t> steps_{0};

  // Guards what follows.
  const std::shared_ptr<WakeUp> wake_up_ = std::make_shared<WakeUp>();
  std::vector<std::shared_ptr<Request>> incoming_;
  bool stopping_ = false;

  // The thread's own.
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ForwardPass> forward_;
  std::vector<std::shared_ptr<Request>> active_;
  AlignedBuffer<float> logits_;
  size_t rotation_ = 0;

  std::thread thread_;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_SCHEDULER_H_
