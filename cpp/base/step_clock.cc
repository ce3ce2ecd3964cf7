#include "base/step_clock.h"

namespace gkv {
namespace {

uint64_t Between(std::chrono::steady_clock::time_point begin,
                 std::chrono::steady_clock::time_point end) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin)
          .count());
}

}  // namespace

void StepClock::Begin() {
  last_ = now_();
  part_ = StepPart::kPlanning;
  held_ = joining_ = parallel_ = false;
  Clear();
}

void StepClock::Clear() {
  begin_ = last_;
  loops_ = 0;
  parallel_ns_ = serial_ns_ = {};
}

void StepClock::Charge() {
  const std::chrono::steady_clock::time_point now = now_();
  const StepPart part = joining_ ? StepPart::kJoins : part_;
  Nanoseconds& sums = parallel_ || joining_ ? parallel_ns_ : serial_ns_;
  sums[static_cast<size_t>(part)] += Between(last_, now);
  last_ = now;
}

void StepClock::Add(StepPhase phase, size_t steps, size_t rows) {
  Charge();
  const MutexLock lock(mutex_);
  Sums& sums = sums_[static_cast<size_t>(phase)];
  sums.steps += steps;
  sums.rows += rows;
  sums.loops += loops_;
  sums.nanoseconds += Between(begin_, last_);
  for (size_t i = 0; i < kStepParts; ++i) {
    sums.parts[i] += serial_ns_[i] + parallel_ns_[i];
    sums.serial[i] += serial_ns_[i];
  }
  Clear();
}

StepProfile StepClock::profile() const {
  StepProfile profile;
  const MutexLock lock(mutex_);
  for (size_t p = 0; p < kStepPhases; ++p) {
    const Sums& sums = sums_[p];
    PhaseProfile& phase = profile.phases[p];
    phase.steps = sums.steps;
    phase.rows = sums.rows;
    phase.loops = sums.loops;
    phase.seconds = static_cast<double>(sums.nanoseconds) * 1e-9;
    for (size_t i = 0; i < kStepParts; ++i) {
      phase.part_s[i] = static_cast<double>(sums.parts[i]) * 1e-9;
      phase.serial_s[i] = static_cast<double>(sums.serial[i]) * 1e-9;
    }
  }
  return profile;
}

}  // namespace gkv
