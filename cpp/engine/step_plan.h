#ifndef GEMMAKV_ENGINE_STEP_PLAN_H_
#define GEMMAKV_ENGINE_STEP_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "gemmakv/options.h"

namespace gkv {

// Positions [begin, end) that one step has to take whole.
using UncutSpan = std::pair<size_t, size_t>;

// What PlanStep needs to know of a request. Positions [next, target) are to be
// computed; there are none if the request cannot run.
struct PlanInput {
  size_t next = 0;
  size_t target = 0;
  size_t logits_begin = 0;  // rows from here on want logits
  bool decoding = false;    // [next, target) goes into one step
  // The place in the order in which requests were last served, or came.
  uint64_t served = 0;
  std::span<const UncutSpan> uncut = {};  // ascending, disjoint
};

// Rows [begin, end) of one request in the next step.
struct PlannedSlice {
  size_t request;  // index into the inputs
  size_t begin;
  size_t end;
};

// Returns how many rows of [begin, end) want logits.
constexpr size_t LogitsRows(size_t logits_begin, size_t begin, size_t end) {
  const size_t first = logits_begin > begin ? logits_begin : begin;
  return end > first ? end - first : 0;
}

// Returns the most guesses that a request may have: options.max_guesses, if
// that leaves prompts their quarter of the rows.
size_t MaxGuesses(const SchedulerOptions& options);

// Chooses the rows of the next step. Pure.
//
// Decoding requests come first, each with all its rows, in the order of their
// waiting times. While prompts wait too, a quarter of the rows is theirs, and a
// quarter of the rows of logits as far as they can use them. Half of what
// prompts get goes to the prompts that have waited longest. The rest is shared
// evenly, and what a short prompt leaves of its share goes to the others, so
// that a short prompt never waits for the whole of a long one.
//
// Nobody starves, whatever the others do: of n requests of one kind (decoding,
// prefilling) that can run, each is served at least once in any n consecutive
// steps, if no one needs more than three quarters of `logits_rows`, or of
// `step_rows`, to decode. Later arrivals do not count, as they come after
// these.
std::vector<PlannedSlice> PlanStep(std::span<const PlanInput> requests,
                                   const SchedulerOptions& options);

}  // namespace gkv

#endif  // GEMMAKV_ENGINE_STEP_PLAN_H_
