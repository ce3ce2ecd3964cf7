#ifndef GEMMAKV_ENGINE_EMBEDDER_H_
#define GEMMAKV_ENGINE_EMBEDDER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/step_clock.h"
#include "base/thread_pool.h"
#include "model/embedding.h"
#include "model/forward.h"

namespace gkv {

// Makes vectors of texts with a bidirectional model, for any number of callers
// at the same time. It has no thread of its own: one of the waiting callers at
// a time runs the next step, with texts of all of them. A step takes the
// longest text of the caller whose turn it is, then, caller by caller, texts
// that still fit. So short or single texts share the reading of the weights,
// and nobody waits for the whole of another's call. The result of a text does
// not depend on the others. Thread-safe.
class Embedder {
 public:
  using Text = std::span<const int32_t>;

  // `profiled`: whether steps are timed part by part. With `processors` the
  // threads of the pool stay on these processors, see ThreadPool, and a
  // caller's thread while it runs a step.
  Embedder(std::shared_ptr<const Model> model, size_t num_threads,
           bool profiled = false, std::span<const Processor> processors = {});
  Embedder(const Embedder&) = delete;

  // Writes `out` [texts.size(), VectorSize(config)], see EmbeddingPass. `poll`
  // is called now and then, on this thread and with no lock held. What it
  // throws ends the call as soon as nothing uses its texts any more. Throws
  // what EmbeddingPass::Run throws, which fails the calls of the same step and
  // no others. Requires: texts of 1 to context_length tokens in [0,
  // vocab_size).
  void Embed(std::span<const Text> texts, float* out,
             const std::function<void()>& poll = {});

  // The number of steps so far.
  size_t steps() const;
  // Returns where the time of the steps went. Requires: profiled.
  StepProfile profile() const { return clock_->profile(); }

 private:
  struct Call;
  struct Item {  // a text of a step
    Call* call;
    size_t index;
  };

  std::vector<Item> TakeStep() REQUIRES(mutex_);
  void RunStep(const std::vector<Item>& items);
  void Forget(Call& call, MutexLock& lock) REQUIRES(mutex_);

  const std::shared_ptr<const Model> model_;
  const std::unique_ptr<StepClock> clock_;  // null: not profiled
  const std::vector<Processor> processors_;
  // Used by the caller that runs the step.
  ThreadPool pool_;
  EmbeddingPass pass_;

  mutable Mutex mutex_{AtFork::kWaits};
  Condition changed_{mutex_};
  // Calls with waiting texts, in the order of turns.
  std::deque<Call*> calls_ GUARDED_BY(mutex_);
  bool running_ GUARDED_BY(mutex_) = false;
  size_t steps_ GUARDED_BY(mutex_) = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_EMBEDDER_H_
