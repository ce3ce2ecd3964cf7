#ifndef GEMMAKV_BASE_STEP_CLOCK_H_
#define GEMMAKV_BASE_STEP_CLOCK_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/mutex.h"
#include "gemmakv/profile.h"

namespace gkv {

// Measures what the thread that drives a model's steps spends its time on.
// Every moment of a step belongs to one part, so the parts sum to the step.
// That thread calls everything but profile(), which any thread may call.
class StepClock {
 public:
  using Now = std::chrono::steady_clock::time_point (*)();

  // `now` returns the time; tests have one of their own.
  explicit StepClock(Now now = &std::chrono::steady_clock::now) : now_(now) {}
  StepClock(const StepClock&) = delete;

  // Begins a step, in the part of planning. A step that began before and did
  // not end is forgotten.
  void Begin();
  // Begins another part of the step. Requires: no parallel loop runs.
  void Enter(StepPart part) {
    if (held_) return;
    Charge();
    part_ = part;
  }
  // While it is held, the step stays in its part, whatever is entered: what
  // another model computes meanwhile has no parts in this model's step.
  void Hold(bool held) { held_ = held; }
  // Ends the step. Called before the step delivers its results, so a caller
  // that has a result finds the step in the sums.
  void End(StepPhase phase, size_t rows) { Add(phase, 1, rows); }
  // Adds the time since then to the step that has ended.
  void AddRest(StepPhase phase) { Add(phase, 0, 0); }

  // The thread pool calls these in turn: when it starts a loop, when this
  // thread begins to run tasks of it, when no task is left, when all threads
  // are done.
  void Fork() {
    Charge();
    ++loops_;
    joining_ = true;
  }
  void Work() {
    Charge();
    joining_ = false;
    parallel_ = true;
  }
  void Wait() {
    Charge();
    joining_ = true;
    parallel_ = false;
  }
  void Join() {
    Charge();
    joining_ = false;
  }

  // Returns the sums over all steps that have ended. The parts always sum to
  // the seconds.
  StepProfile profile() const;

 private:
  using Nanoseconds = std::array<uint64_t, kStepParts>;
  struct Sums {
    uint64_t steps = 0, rows = 0, loops = 0, nanoseconds = 0;
    Nanoseconds parts = {};
    Nanoseconds serial = {};
  };

  void Charge();
  void Clear();
  void Add(StepPhase phase, size_t steps, size_t rows);

  const Now now_;
  // The state of the step that runs.
  std::chrono::steady_clock::time_point begin_, last_;
  StepPart part_ = StepPart::kPlanning;
  bool held_ = false;
  bool joining_ = false;
  bool parallel_ = false;
  uint64_t loops_ = 0;
  Nanoseconds parallel_ns_ = {};
  Nanoseconds serial_ns_ = {};

  mutable Mutex mutex_{AtFork::kLeaves};
  std::array<Sums, kStepPhases> sums_ GUARDED_BY(mutex_) = {};
};

}  // namespace gkv

#endif  // GEMMAKV_BASE_STEP_CLOCK_H_
