#include "engine/step_wait.h"

#include <map>

#include "base/error.h"
#include "base/inside_step.h"
#include "base/mutex.h"

namespace gkv {
namespace {

// Counts which runner waits for which. There is no circle among them.
struct Waits {
  using Pair = std::pair<const void*, const void*>;
  Mutex mutex{AtFork::kWaits};
  std::map<Pair, size_t> count GUARDED_BY(mutex);

  static Waits& Get() {
    // Never destroyed: models may outlive static objects.
    static auto* const waits = new Waits;
    return *waits;
  }

  // Whether a step of `from` waits for `to`, directly or not.
  bool Reaches(const void* from, const void* to) const REQUIRES(mutex) {
    if (from == to) return true;
    for (auto at = count.lower_bound({from, nullptr});
         at != count.end() && at->first.first == from; ++at) {
      if (Reaches(at->first.second, to)) return true;
    }
    return false;
  }
};

}  // namespace

void StepWait::CheckNotInside(const void* runner) {
  if (InsideStep::Runner() != runner) return;
  throw Busy(
      "the model: called inside one of its own steps, as by a "
      "logits_processor, which would wait for itself; expected another model, "
      "or a call after the step");
}

StepWait::StepWait(const void* runner)
    : step_(InsideStep::Runner()), runner_(runner) {
  if (step_ == nullptr) return;
  CheckNotInside(runner);
  Waits& waits = Waits::Get();
  const MutexLock lock(waits.mutex);
  if (waits.Reaches(runner, step_)) {
    throw Busy(
        "the model: one of its steps waits for the step that calls it, as "
        "where logits_processors of two models call each other; expected that "
        "one of the two does not");
  }
  ++waits.count[{step_, runner_}];
}

StepWait::~StepWait() {
  if (step_ == nullptr) return;
  Waits& waits = Waits::Get();
  const MutexLock lock(waits.mutex);
  const auto found = waits.count.find({step_, runner_});
  if (--found->second == 0) waits.count.erase(found);
}

}  // namespace gkv
