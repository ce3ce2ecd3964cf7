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

// Vectors of texts by a bidirectional model, for any number of callers at the
// same time. It has no thread of its own: of those who wait, one at a time runs
// the next step, with the texts of whoever waits: the longest of the caller
// whose turn it is, then, one after the other, those of all callers that still
// fit. Texts that are short, or come alone, share the reading of the weights,
// and nobody waits for the whole of another's call. No result depends on that.
// Thread-safe.
class Embedder {
 public:
  using Text = std::span<const int32_t>;

  // `profiled`: whether its steps are timed part by part.
  // With `processors` the pool's threads stay on them, see ThreadPool, and a
  // caller's for as long as it runs a step.
  Embedder(std::shared_ptr<const Model> model, size_t num_threads,
           bool profiled = false, std::span<const Processor> processors = {});
  Embedder(const Embedder&) = delete;

  // out [texts.size(), VectorSize(config)], as of EmbeddingPass. `poll` is called now
  // and then, on this thread and with no lock held; what it throws ends the
  // call, once nothing uses its texts any more. Throws what EmbeddingPass::Run
  // throws, without an effect on other calls but those of the same step.
  // Requires: texts of 1 to context_length tokens in [0, vocab_size).
  void Embed(std::span<const Text> texts, float* out,
             const std::function<void()>& poll = {});

  // Steps so far.
  size_t steps() const;
  // Where their time went. Requires: profiled.
  StepProfile profile() const { return clock_->profile(); }

 private:
  struct Call;
  struct Item {  // a text that waits
    Call* call;
    size_t index;
  };

  std::vector<Item> TakeStep() REQUIRES(mutex_);
  void RunStep(const std::vector<Item>& items);
  void Forget(Call& call, MutexLock& lock) REQUIRES(mutex_);

  const std::shared_ptr<const Model> model_;
  const std::unique_ptr<StepClock> clock_;  // null: not profiled
  const std::vector<Processor> processors_;
  // Of whoever runs the step.
  ThreadPool pool_;
  EmbeddingPass pass_;

  mutable Mutex mutex_{AtFork::kWaits};
  Condition changed_{mutex_};
  // With texts that wait, in the order of turns.
  std::deque<Call*> calls_ GUARDED_BY(mutex_);
  bool running_ GUARDED_BY(mutex_) = false;
  size_t steps_ GUARDED_BY(mutex_) = 0;
};

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_EMBEDDER_H_
