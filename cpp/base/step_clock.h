#ifndef GEMMAKV_BASE_STEP_CLOCK_H_
#define GEMMAKV_BASE_STEP_CLOCK_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/mutex.h"
#include "gemmakv/profile.h"

namespace gkv {

// Tells what the thread that drives a model's steps spends its time on. Every
// moment of a step is in one part: the parts sum to the step. One thread drives
// it; any may read the sums.
class StepClock {
 public:
  using Now = std::chrono::steady_clock::time_point (*)();

  // `now`: what to read the time from, for tests.
  explicit StepClock(Now now = &std::chrono::steady_clock::now) : now_(now) {}
  StepClock(const StepClock&) = delete;

  // A step begins, with planning. What began before and did not end is
  // forgotten.
  void Begin();
  // From now on it is this part. In no parallel loop.
  void Enter(StepPart part) {
    if (held_) return;
    Charge();
    part_ = part;
  }
  // While it is held, the step stays in the part that it is in: what another
  // model computes meanwhile is no part of this one's.
  void Hold(bool held) { held_ = held; }
  // The step ends. Called before it gives anything to anyone: whoever has that
  // finds the step in the sums.
  void End(StepPhase phase, size_t rows) { Add(phase, 1, rows); }
  // What came since belongs to it, too.
  void AddRest(StepPhase phase) { Add(phase, 0, 0); }

  // The thread pool's: another loop starts, its tasks run on this thread, it
  // has none left, all threads are done.
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

  // All steps that have ended. The parts always sum to the seconds.
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
  // Of the step that runs.
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
