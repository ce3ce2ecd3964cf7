#include "engine/forced_guesser.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>

namespace gkv {
namespace {

// A step waits for forced tokens for this share of its own time.
constexpr double kForcedShare = 0.02;

// Asks one constraint, on any thread. What it throws fails the request with the
// next masks.
void Compute(Candidate& c) noexcept {
  try {
    const size_t count = c.constraint->Forced(c.forced);
    c.forced.resize(std::min(c.forced.size(), count));
  } catch (...) {
    c.forced_error = std::current_exception();
    c.forced.clear();
  }
}

void Take(Candidate& c) noexcept {
  const bool agrees =
      c.proposed.size() >= c.forced.size() &&
      std::equal(
          c.forced.begin(), c.forced.end(), c.proposed.begin(),
          [](int32_t id, const DraftGuess& guess) { return id == guess.id; });
  if (!agrees) {
    try {
      c.proposed.resize(c.forced.size());
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  for (size_t i = 0; i < c.forced.size(); ++i) c.proposed[i] = {c.forced[i]};
}

}  // namespace

ForcedGuesser::ForcedGuesser(SideWork& side_work)
    : side_work_(side_work), compute_([this] {
        for (Candidate* const c : asked_) {
          Compute(*c);
          done_.fetch_add(1, std::memory_order_release);
        }
      }) {}

void ForcedGuesser::Ask(std::span<Candidate* const> round,
                        const GuessCosts& costs) noexcept {
  asked_.clear();
  done_ = 0;
  if (!CertainGuessesPay(costs)) return;
  try {
    for (Candidate* const c : round) {
      if (!c->is_new || !c->sources.forced || c->constraint == nullptr ||
          c->most == 0) {
        continue;
      }
      c->forced.resize(c->most);
      asked_.push_back(c);
    }
  } catch (const std::bad_alloc&) {
    // The others are not asked.
  }
  if (asked_.empty()) return;
  // If there is time for some of them only, these are not always the same.
  std::rotate(asked_.begin(),
              asked_.begin() + static_cast<ptrdiff_t>(turn_++ % asked_.size()),
              asked_.end());
  side_work_.Begin(compute_);
}

void ForcedGuesser::Propose(std::span<Candidate* const>,
                            const GuessCosts& costs) noexcept {
  if (asked_.empty()) return;
  if (costs.always) {
    side_work_.Wait();
  } else {
    const std::chrono::duration<double> time(kForcedShare * costs.step);
    side_work_.Wait(Worker::Clock::now() +
                    std::chrono::duration_cast<Worker::Clock::duration>(time));
  }
  const size_t done = done_.load(std::memory_order_acquire);
  for (size_t i = 0; i < done; ++i) Take(*asked_[i]);
}

}  // namespace gkv
